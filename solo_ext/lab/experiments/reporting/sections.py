"""A benchmark's part of the report, from its first heading to its last table."""

from __future__ import annotations

from collections.abc import Sequence

from solo_ext.lab.experiments.reporting.blocks import (
    Block,
    Bullets,
    Figures,
    Heading,
    Paragraph,
    Table,
)
from solo_ext.lab.experiments.reporting.figures import curve_figures, loss_figures, score_figures
from solo_ext.lab.experiments.reporting.origins import (
    environments_table,
    machines,
    protocols_table,
    rows_table,
)
from solo_ext.lab.experiments.reporting.reported import PublishedNumber, selected
from solo_ext.lab.experiments.reporting.results import Place, Results
from solo_ext.lab.experiments.reporting.statistics import common_seeds
from solo_ext.lab.experiments.reporting.tables import (
    best_rows,
    differences_table,
    place_ranks,
    published_columns,
    published_table,
    scores_table,
)
from solo_ext.lab.experiments.reporting.verdicts import Verdict, verdicts
from solo_ext.lab.experiments.reporting.wording import counted, mean_and_interval, p_value
from solo_ext.lab.experiments.settings import Hypothesis


def benchmark_blocks(results: Results) -> list[Block]:
    """Everything that one folder says; headings begin at the second level."""
    settings = results.settings
    blocks: list[Block] = []
    if settings.about:
        blocks.append(Paragraph(settings.about))
    blocks.append(Paragraph(_counts(results)))
    if notes := [*results.left_out, *_without_records(results)]:
        blocks.append(Bullets(notes))
    for place in results.places():
        blocks += place_blocks(results, place)
    blocks += hypothesis_blocks(results)
    if results.records:
        blocks += origin_blocks(results)
    return blocks


def place_title(results: Results, place: Place) -> str:
    """Names the budget where there is more than one."""
    if len(results.settings.budgets) == 1:
        return place.dataset
    return f"{place.dataset}, budget {place.budget}"


def published_numbers(results: Results, place: Place) -> list[PublishedNumber]:
    """What the settings of the data set select."""
    wanted = results.settings.datasets[place.dataset].reported
    key = f"datasets.{place.dataset}.reported"
    return [number for one in wanted for number in selected(one, key)]


def place_blocks(results: Results, place: Place) -> list[Block]:
    """Tables and charts of one data set and budget."""
    numbers = published_numbers(results, place)
    blocks: list[Block] = [
        Heading(2, place_title(results, place)),
        Paragraph(_trained(results, place), soft=True),
    ]
    if warnings := _warnings(results, place):
        blocks.append(Bullets(warnings))
    blocks += [
        Heading(3, "Scores"),
        scores_table(results, place, numbers),
        Paragraph(_how_to_read(results, place), soft=True),
    ]
    if published_columns(results, place, numbers):
        blocks.append(
            Paragraph(
                "Columns headed reported hold numbers that others published for the same method, "
                "with other code, hardware, budgets and protocols: they are no part of this "
                "comparison. Their sources are in the table of reported numbers.",
                soft=True,
            )
        )
    if figures := score_figures(results, place):
        blocks.append(Figures(figures))
    differences = differences_table(results, place)
    if differences.rows:
        blocks += [
            Heading(3, "Differences to the rows compared with"),
            differences,
            Paragraph(
                "Mean of the differences paired by seed and its 95 % interval over seeds "
                "(Student's t). An interval without 0 is one of many here: some of them leave out "
                "0 by chance.",
                soft=True,
            ),
        ]
    if results.measures and (curves := curve_figures(results, place, results.measures[0])):
        blocks += [
            Heading(3, f"{results.measures[0]} while training"),
            Paragraph(
                "Mean over seeds, at the epochs that every seed measured; seconds are of training "
                "alone. Broken level lines: rows that train nothing.",
                soft=True,
            ),
            Figures(curves),
        ]
    if losses := loss_figures(results, place):
        blocks += [
            Heading(3, "Loss while training"),
            Paragraph(
                "Mean over seeds. Each method minimises a loss of its own, on a scale of its own: "
                "the lower of two methods' losses does not mean the better features.",
                soft=True,
            ),
            Figures(losses),
        ]
    if numbers:
        blocks += [Heading(3, "Reported numbers"), published_table(numbers)]
    return blocks


def hypothesis_blocks(results: Results) -> list[Block]:
    """The verdicts, what was claimed, and what was not tested."""
    if not results.settings.hypotheses:
        return []
    found = verdicts(results)
    blocks: list[Block] = [
        Heading(2, "Hypotheses"),
        Paragraph(
            "Written down before the runs, at the times given; one that is changed when runs of it "
            "are known stays undecided. Reproduced: the whole 95 % interval of the differences "
            "paired by seed is on the expected side. Contradicted: it is on the other side. "
            "Undecided: it holds 0, or there are fewer pairs than the hypothesis asks for. p: "
            "paired t test, two-sided. "
            f"{counted(len(found), 'test was', 'tests were')} made; where nothing differs, one in "
            "twenty of such intervals leaves out 0 by chance. Holm's p is adjusted for all of them."
        ),
    ]
    if found:
        blocks.append(_verdict_table(results, found))
    tested = {verdict.name for verdict in found}
    claims = []
    for name, hypothesis in results.settings.hypotheses.items():
        untested = "" if name in tested else " Not tested: no runs of both rows."
        note = f" Note: {hypothesis.note}" if hypothesis.note else ""
        claim = hypothesis.claim.rstrip(".")
        since = f" Written {results.written[name]}." if name in results.written else ""
        claims.append(f"{name}: {claim}. {hypothesis.source}.{since}{untested}{note}")
    return [*blocks, Bullets(claims)]


def origin_blocks(results: Results) -> list[Block]:
    """Where the numbers come from."""
    return [
        Heading(2, "What ran where"),
        environments_table(results.records),
        Paragraph(_patches(results)),
        Heading(2, "How each number is measured"),
        Paragraph(
            "Scores are percent, after the last epoch, on the test split, which chooses nothing; "
            "the backbone is frozen unless the protocol says otherwise. Seconds and images/s are "
            "of training without evaluations, on machines that may have run other jobs. Peak "
            "memory is that of the training process."
        ),
        protocols_table(results.records),
        Heading(3, "What each row trains"),
        rows_table(results),
        *_budgets(results),
    ]


def _patches(results: Results) -> str:
    """What of solo-learn's methods is other than it has them, by the runs' own notes."""
    rows: dict[str, set[str]] = {}
    for record in results.records:
        patches = record["environment"]["host"].get("patches")
        if patches is None:
            return (
                "Some runs are of before solo-learn's methods were left as it has them: momentum "
                "networks were averaged in place, LARS and schedules were those of timm and torch."
            )
        for patch in patches:
            rows.setdefault(patch, set()).add(results.label(record["row"]))
    if not rows:
        return "solo-learn's methods train as it has them, without patches."
    listed = "; ".join(f"{patch} ({', '.join(sorted(of))})" for patch, of in sorted(rows.items()))
    return (
        "solo-learn's methods train as it has them, but for patches, of which docs/hosts.md says "
        f"what they change: {listed}."
    )


def _counts(results: Results) -> str:
    rows = {r["row"] for r in results.records}
    return (
        f"{counted(len(results.records), 'run', 'runs')} of {counted(len(rows), 'row', 'rows')} "
        f"on {counted(len(results.places()), 'data set and budget', 'data sets and budgets')}; "
        f"seeds {', '.join(map(str, results.settings.seeds))}."
    )


def _without_records(results: Results) -> list[str]:
    empty = [f"{p.dataset} ({p.budget})" for p in results.empty_places()]
    return [f"No runs yet: {', '.join(empty)}."] if empty else []


def _trained(results: Results, place: Place) -> str:
    held = [r for row in results.rows(place) for r in results.runs(place, row).values()]
    trained = [r for r in held if r["kind"] in ("plugin", "host")]
    if not trained:
        return "Nothing was trained."
    epochs = sorted({r["epochs"] for r in trained})
    images = sorted({r["images"] for r in trained})
    return f"{_one_of(epochs)} epochs of {_one_of(images)} images."


def _one_of(values: Sequence[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def _warnings(results: Results, place: Place) -> list[str]:
    notes = []
    if missing := results.missing(place):
        listed = "; ".join(
            f"{results.label(row)}: {'seed' if len(seeds) == 1 else 'seeds'} "
            f"{', '.join(map(str, seeds))}"
            for row, seeds in missing.items()
        )
        notes.append(f"Missing runs. {listed}.")
    for row in results.rows(place):
        if keys := results.differing(place, row):
            notes.append(
                f"The seeds of {results.label(row)} ran with different settings: {', '.join(keys)}."
            )
    for row in results.rows(place):
        for base in results.settings.rows[row].bases:
            if keys := results.unlike(place, row, base):
                notes.append(
                    f"{results.label(row)} and {results.label(base)} are not of the same "
                    f"{', '.join(keys)}: their difference is not one of methods alone."
                )
    if len(commits := results.commits()) > 1:
        notes.append(f"Runs are of several versions of the plugin: {', '.join(commits)}.")
    held = [r for row in results.rows(place) for r in results.runs(place, row).values()]
    if len(found := machines(held)) > 1:
        notes.append(
            f"Seconds and images/s are of {len(found)} kinds of machine and threads, and do not "
            "compare."
        )
    return notes


def _how_to_read(results: Results, place: Place) -> str:
    ranks, first = place_ranks(results, place), (results.measures or [""])[0]
    words = ["Mean ± sample deviation over seeds."]
    if any(best_rows(results, place, measure) for measure in results.measures):
        words.append(
            "Bold: the highest mean of the rows of solo_ext and solo-learn, of those with the "
            "most seeds; whether it is apart from the others, the differences say."
        )
    references = [
        results.label(row) for row in results.rows(place) if results.settings.rows[row].reference
    ]
    if references:
        words.append(f"For reference, neither bold nor ranked: {', '.join(references)}.")
    if ranks:
        scores = {row: results.scores(place, row, first) for row in ranks}
        seeds = common_seeds(scores)
        words.append(
            f"Mean rank: by {first} among the {counted(len(ranks), 'row', 'rows')} that have the "
            f"most seeds, 1 is the highest; over {'seed' if len(seeds) == 1 else 'seeds'} "
            f"{', '.join(map(str, seeds))}."
        )
    elif results.ranked(place):
        words.append("No mean rank: the rows with the most seeds share none.")
    words.append("n: seeds with that score, where fewer than the row has.")
    return " ".join(words)


def _expected(hypothesis: Hypothesis) -> str:
    if hypothesis.direction != "not_above":
        return hypothesis.direction
    return f"at most {hypothesis.margin:g} above" if hypothesis.margin else "not above"


def _verdict_table(results: Results, found: Sequence[Verdict]) -> Table:
    lines = []
    for verdict in found:
        hypothesis = verdict.hypothesis
        reason = f" ({verdict.reason})" if verdict.reason else ""
        lines.append(
            [
                verdict.name,
                place_title(results, verdict.place),
                f"{results.label(hypothesis.row)} {_expected(hypothesis)} "
                f"{results.label(hypothesis.base)} in {hypothesis.measure}",
                str(len(verdict.differences)),
                mean_and_interval(verdict.estimate),
                p_value(verdict.p_value),
                p_value(verdict.adjusted),
                verdict.answer + reason,
            ]
        )
    head = [
        "Hypothesis",
        "Data set",
        "Expected",
        "Pairs",
        "Difference, 95 % interval",
        "p",
        "Holm's p",
        "Verdict",
    ]
    return Table(head, lines, numeric=frozenset({3, 4, 5, 6}))


def _budgets(results: Results) -> list[Block]:
    settings = results.settings
    lines = [
        *((name, "budget", changes) for name, changes in settings.budgets.items()),
        *((name, "data set", entry.changes) for name, entry in settings.datasets.items()),
    ]
    rows = [[name, what, ", ".join(changes)] for name, what, changes in lines if changes]
    blocks: list[Block] = []
    if rows:
        blocks = [
            Heading(3, "Changes of every row"),
            Table(["Name", "Of", "Changes"], rows),
        ]
    if (tuning := settings.tuning) is not None:
        blocks.append(
            Paragraph(
                f"Tuning: {tuning.trials} trials of each row, by {tuning.measure} "
                f"on {100 * tuning.holdout:g} % of the training images, held out."
            )
        )
    return blocks
