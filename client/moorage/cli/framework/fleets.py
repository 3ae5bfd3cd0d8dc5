"""Several fleets in one answer: `--nats a --nats b`. One that does not answer is a line beside the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from moorage.cli.framework.arguments import Again
from moorage.cli.framework.console import emit, print_err, print_out
from moorage.cli.framework.exit_codes import exit_code_of
from moorage.cli.framework.options import Options, RowOptions, client_of, guarded
from moorage.cli.framework.render import table
from moorage.schemas.errors import MoorageError

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.frames import Answer

Given = TypeVar("Given", bound=Options)
T = TypeVar("T")

#: the column with the fleet's name, as it was given with --nats
FLEET: Final = "FLEET"


class Table(NamedTuple):
    """A table before it is drawn; see `render.table`."""

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    numbers: Sequence[str] = ()
    optional: Sequence[str] = ()
    shortened: Sequence[str] = ()

    def __str__(self) -> str:
        return table(self.header, self.rows, numbers=self.numbers, optional=self.optional, shortened=self.shortened)


def are_several(options: Options) -> bool:
    return isinstance(options.nats, Again)


def each_of(options: Given) -> list[tuple[str, Given]]:
    """Return the options for each fleet that they name, by its name."""
    assert isinstance(options.nats, Again)
    return [(name, replace(options, nats=name)) for name in options.nats.all]


def show_each(
    options: RowOptions,
    ask: Callable[[AsyncClient], Awaitable[Answer]],
    rows_of: Callable[[Answer], Sequence[Any]],
    table_of: Callable[[Answer], Table],
) -> int:
    """Ask each fleet of `options`, all at once, and print one table. Returns 0 if one of them has answered."""

    def act() -> int:
        from moorage.cli.framework.interrupts import run

        names = [name for name, _ in each_of(options)]
        answers = run(ask_each(options, ask))
        told = [each for each in answers if not isinstance(each, MoorageError)]
        if options.json:
            emit({"kind": "fleets", "fleets": [_frame(name, each) for name, each in zip(names, answers, strict=True)]})
        elif options.format is not None:
            from moorage.cli.framework.fields import filled

            for name, answer in zip(names, answers, strict=True):
                for row in () if isinstance(answer, MoorageError) else rows_of(answer):
                    print_out(filled(options.format, {"fleet": name, **row}))
        elif told:
            tables = [
                (n, table_of(each))
                for n, each in zip(names, answers, strict=True)
                if not isinstance(each, MoorageError)
            ]
            first = tables[0][1]
            rows = [[name, *row] for name, each in tables for row in each.rows]
            print_out(str(first._replace(header=[FLEET, *first.header], rows=rows)))
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, MoorageError):
                print_err(f"{name}: {answer.problem.message}")
        errors = [each for each in answers if isinstance(each, MoorageError)]
        return 0 if told else exit_code_of(errors[0])

    return guarded(replace(options, nats=None), act)


async def ask_each(options: Options, ask: Callable[[AsyncClient], Awaitable[T]]) -> list[T | MoorageError]:
    """Ask each fleet of `options`, all at once, and return the answers in their order, or what went wrong instead."""

    async def one(options: Options) -> T | MoorageError:
        try:
            async with client_of(options) as client:
                return await ask(client)
        except MoorageError as error:
            return error

    return await asyncio.gather(*(one(each) for _, each in each_of(options)))


def _frame(name: str, answer: Answer | MoorageError) -> dict[str, Any]:
    import msgspec

    told = answer.problem if isinstance(answer, MoorageError) else answer
    found: dict[str, Any] = msgspec.to_builtins(told)
    return {"fleet": name, "error": found} if isinstance(answer, MoorageError) else {"fleet": name, **found}
