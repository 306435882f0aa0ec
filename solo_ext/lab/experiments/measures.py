"""Names of scores, before there are any."""

from __future__ import annotations

from solo_ext.core.errors import ConfigError, nearest
from solo_ext.lab.experiments.settings import BenchmarkSettings


def check_measure(key: str, measure: str, settings: BenchmarkSettings) -> None:
    """Refuses a score that no protocol of the evaluation can give.

    A score is called after its protocol, and what it is of: ``knn``, ``lowshot_10_per_class``.

    Raises:
        ConfigError: naming the protocols.
    """
    protocols = settings.evaluation
    if not any(measure == p or measure.startswith(f"{p}_") for p in protocols):
        raise ConfigError(
            key, measure, "no protocol of the evaluation gives it", nearest(measure, protocols)
        )


def check_measures(settings: BenchmarkSettings) -> None:
    """Those of the headline and the hypotheses.

    Raises:
        ConfigError: one that no protocol gives, or a row that is compared with itself.
    """
    for measure in settings.headline or ():
        check_measure("headline", measure, settings)
    for name, hypothesis in settings.hypotheses.items():
        check_measure(f"hypotheses.{name}.measure", hypothesis.measure, settings)
        if hypothesis.row == hypothesis.base:
            raise ConfigError(
                f"hypotheses.{name}.base", hypothesis.base, "is the row itself", "name another"
            )
