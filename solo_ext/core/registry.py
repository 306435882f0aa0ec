"""Table of methods or losses that configs select by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from solo_ext.core.errors import UserError, suggest_name

T = TypeVar("T")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A registered class or function, and where it comes from.

    Attributes:
        name: the name in configs.
        target: the class or function.
        paper: title of the paper, empty if there is none.
        year: year of publication, 0 if there is none.
        arxiv: arXiv number such as ``2007.00224``, empty if there is none.
        origin: distribution or package that defines it.

    >>> entry = Entry("nnclr", dict, paper="With a Little Help from My Friends", year=2021)
    >>> entry.name, entry.year, entry.origin
    ('nnclr', 2021, 'solo_ext')
    """

    name: str
    target: T
    paper: str = ""
    year: int = 0
    arxiv: str = ""
    origin: str = "solo_ext"


class Registry(dict[str, Entry[T]]):
    """Maps names to entries of one kind, ``method`` or ``loss``, in the order of registration.

    >>> losses = Registry[type]("loss")
    >>> losses.add(Entry("infonce", dict, arxiv="1807.03748"))
    >>> losses["info-nce"]
    Traceback (most recent call last):
    solo_ext.core.errors.UserError: unknown loss 'info-nce'; did you mean 'infonce'? ...
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __missing__(self, name: str) -> Entry[T]:
        raise UserError(f"unknown {self.kind} {name!r}; {suggest_name(name, self)}")

    def register(
        self, name: str, *, paper: str = "", year: int = 0, arxiv: str = ""
    ) -> Callable[[T], T]:
        """Decorator that registers a class or function under ``name``.

        Raises:
            ValueError: the name is taken.
        """

        def add(target: T) -> T:
            origin = getattr(target, "__module__", "solo_ext").partition(".")[0]
            self.add(Entry(name, target, paper, year, arxiv, origin))
            return target

        return add

    def add(self, entry: Entry[T]) -> None:
        """Adds an entry.

        Raises:
            ValueError: the name is taken by another target.
        """
        held = self.get(entry.name)
        if held is not None and held.target is not entry.target:
            raise ValueError(
                f"{self.kind} {entry.name!r} of {entry.origin} is already registered by "
                f"{held.origin}; choose another name"
            )
        self[entry.name] = entry
