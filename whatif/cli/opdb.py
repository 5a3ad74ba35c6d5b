"""``whatif opdb``: the database of measured operators: import, look up, share, check, evaluate."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whatif.cli.opdb_names import device_name, family_name, the_store
from whatif.cli.options import add_json, number, whole_number
from whatif.cli.reading import progress_bar, show, warn
from whatif.units import counted

if TYPE_CHECKING:
    from whatif.opdb.evaluate import Fit
    from whatif.opdb.merging import Merged
    from whatif.opdb.provenance import Method

# Subcommands parse their own words; options stand after them.
REST_IS_FOREIGN = True

_SEED = whole_number(0, expected="a natural number")
_SHARE = number(lambda share: 0 < share < 1, "a share between 0 and 1")
_KINDS = ("neusight", "nccl-tests", "recording", "csv", "aiconfigurator", "deepbench")
_ANSWER_SOURCES = ("exact", "interpolated", "learned", "same_chip", "same_shape", "learned_across", "analytic")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of ``whatif opdb``."""
    commands = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
        )
        sub.set_defaults(subrun=run)
        sub.add_argument(
            "--db",
            metavar="FOLDER",
            help="folder of the database (default: $WHATIF_OPDB, else the one in your user data folder)",
        )
        for flag in ("--quiet", "--debug"):  # as after every other command
            sub.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        add_json(sub)
        return sub

    from whatif.cli.opdb_fit import add_fit_arguments, add_model_argument, run_fit
    from whatif.cli.opdb_profile import add_profile_arguments, run_profile

    importing = command("import", _import, "add measurements from other sources")
    importing.add_argument("kind", choices=_KINDS, metavar="KIND", help=f"format of the file: {', '.join(_KINDS)}")
    importing.add_argument("path", metavar="PATH", help="the file or folder to import")
    importing.add_argument("--device", help="the device, if the file does not name it")
    importing.add_argument(
        "--operator", metavar="NAME", help="the collective, if the output of nccl-tests does not name it"
    )
    importing.add_argument("--author", help="author of the measurements")
    importing.add_argument("--licence", help="licence of the measurements (csv)")
    importing.add_argument("--method", metavar="NAME", help="how the times were measured (csv)")
    importing.add_argument("--cache", choices=("hot", "cold"), help="the state of the cache (csv)")
    importing.add_argument("--launch", choices=("included", "excluded"), help="whether launches are in the times (csv)")

    query = command("query", _query, "show the time of an operator on a device, with its range and source")
    query.add_argument("operator", metavar="OPERATOR", help="for example linear:m=512,n=1024,k=1024,dtype=fp16")
    query.add_argument("--device", required=True, help="the device")
    query.add_argument("--method", metavar="NAME", help="use only times measured by this method")
    query.add_argument("--framework", metavar="NAME", help="use only times measured in this framework")
    query.add_argument(
        "--launch", action="store_true", help="add the launch time to an answer computed from a data sheet alone"
    )

    listing = command("list", _list, "list the measurements by device and family")
    _add_filters(listing)

    export = command("export", _export, "copy contributions to another database, or one family to a CSV table")
    export.add_argument("target", metavar="FOLDER|FILE.csv", help="the database or table to write")
    _add_filters(export)

    merge = command("merge", _merge, "add the contributions of another database")
    merge.add_argument("source", metavar="FOLDER", help="the database to read")
    _add_filters(merge)

    pushing = command("push", _push, "copy this database to an object store or another machine")
    pulling = command("pull", _pull, "add the contributions of a database in an object store or on another machine")
    for sharing in (pushing, pulling):
        sharing.add_argument(
            "url", metavar="URL", help="s3://…, gs://…, ssh://…, file://…, or any other address that fsspec supports"
        )
        _add_filters(sharing)

    compare = command("diff", _diff, "show which measurements only one of two databases has, and which times differ")
    compare.add_argument("other", metavar="FOLDER", help="the other database")

    command("check", _check, "verify the whole database; exit status 1 if something is damaged")

    evaluate = command("evaluate", _evaluate, "measure the error of the estimators on held-out operators")
    _add_filters(evaluate)
    evaluate.add_argument("--seed", type=_SEED, help="seed of the split (default: 2026)")
    evaluate.add_argument("--share", type=_SHARE, help="share of operators to hold out (default: 0.1)")
    evaluate.add_argument(
        "--unseen-device", action="store_true", help="hold out whole devices, one at a time, instead of operators"
    )
    evaluate.add_argument(
        "--fit", action="store_true", help="also fit models to the rest (takes minutes, needs scikit-learn)"
    )
    evaluate.add_argument(
        "--source", action="append", choices=_ANSWER_SOURCES, metavar="SOURCE",
        help=f"evaluate only this source (repeatable): {', '.join(_ANSWER_SOURCES)}",
    )  # fmt: skip
    evaluate.add_argument(
        "--errors", metavar="FILE", help="with --unseen-device: write each source's errors, as the chain weights them"
    )
    add_model_argument(evaluate, "with --fit: model to fit; several are shown side by side")
    # The earlier spelling of --source; scripts may still use it.
    evaluate.add_argument("--rung", action="append", dest="source", choices=_ANSWER_SOURCES, help=argparse.SUPPRESS)

    add_profile_arguments(command("profile", run_profile, "measure operators on this machine"))
    add_fit_arguments(command("fit", run_fit, "fit models to the measurements, for operators not measured"))


def run(args: argparse.Namespace) -> int:
    """Run the subcommand."""
    return int(args.subrun(args))


def _add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="use only this device")
    parser.add_argument("--family", help="only this family of operators")


def _filters(args: argparse.Namespace) -> dict[str, str | None]:
    """The device and the family that a command is limited to."""
    return {"device": device_name(args.device), "family": family_name(args.family)}


def _import(args: argparse.Namespace) -> int:
    from whatif.opdb.importing import add_found, read_foreign

    method = _method(args)
    found = read_foreign(
        args.kind, Path(args.path), device=args.device, operator=args.operator, method=method, author=args.author,
        licence=args.licence,
    )  # fmt: skip
    store = the_store(args, create=True)
    with progress_bar("importing") as progress:
        done = add_found(found, store, progress)
    return _show_merged(args, done, store.folder, found.warnings(), dropped=dict(found.dropped))


def _show_merged(
    args: argparse.Namespace, done: Merged, where: Path | str, warnings: Sequence[str] = (), **more: Any
) -> int:
    """Show what was added where, then the warnings and what was refused."""
    from whatif.report.text_opdb import print_merged

    show(args, lambda: {"database": str(where), **done.to_dict(), **more}, lambda: print_merged(done, where))
    warn([*warnings, *done.refused])
    return 0


def _method(args: argparse.Namespace) -> Method | None:
    from whatif.opdb.provenance import Method
    from whatif.runtime.errors import WhatifError

    if not (args.method or args.cache or args.launch):
        return None
    if args.kind != "csv":
        raise WhatifError(
            "opdb: expected --method, --cache and --launch only with csv: the other formats define their own."
        )
    _check_method(args.method)
    launch = None if args.launch is None else args.launch == "included"
    return Method(name=args.method or "unknown", includes_launch=launch, cache=args.cache or "unknown")


def _check_method(method: str | None) -> None:
    from whatif.opdb.schema import METHODS
    from whatif.runtime.errors import WhatifError

    if method not in (None, *METHODS):
        raise WhatifError(f"opdb: expected a method ({', '.join(METHODS)}), got {method!r}.")


def _some(names: Sequence[str]) -> str:
    """Name the first ten."""
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "") or "none"


def _query(args: argparse.Namespace) -> int:
    from whatif.hardware.gpu import gpu_asked_for
    from whatif.opdb.asking import ask, parse_operator
    from whatif.opdb.data_sheet import MATRIX_FAMILIES
    from whatif.opdb.default import opened
    from whatif.opdb.devices import facts
    from whatif.opdb.learned import shipped_models
    from whatif.report.text_opdb import print_reply
    from whatif.runtime.errors import WhatifError

    _check_method(args.method)
    ops = parse_operator(args.operator)
    with progress_bar("indexing") as progress:
        index, models = opened(args.db, progress=progress)
    device = str(device_name(args.device))
    if device not in index.devices() and facts(device) is None:
        try:
            device = gpu_asked_for(args.device).name
        except WhatifError as error:  # it says which names are close
            raise WhatifError(f"{error}; measured in the database: {_some(index.devices())}.") from None
    reply = ask(
        index, ops, device, method=args.method, framework=args.framework, launch=args.launch,
        models=(*models, *shipped_models()),
    )  # fmt: skip
    if reply.t_s is None:
        here = sorted({c.family for c in index.contributions if c.origin.device.name == reply.device})
        others = [name for name in reply.known_devices if name != reply.device]
        raise WhatifError(
            f"opdb: expected measurements or a data sheet of {reply.device} for {args.operator}, got "
            f"{f'measurements of {_some(here)} that do not' if here else 'none'}; other devices with measurements: "
            f"{_some(others)}."
        )
    warnings, board, dtype = list(index.warnings), facts(args.device), str(reply.operator.get("dtype", ""))
    if board is not None and board.note_on_dies:
        warnings.insert(0, f"opdb: {board.note_on_dies}: this is the time on {device}")
    if board is not None and ops.family in MATRIX_FAMILIES and (runs := board.matrix_dtype(dtype)) != dtype:
        warnings.insert(0, f"opdb: {board.name} has no matrix units for {dtype}: the time is estimated as for {runs}")
    return show(args, reply.to_dict, lambda: print_reply(reply), warnings=warnings)


def _list(args: argparse.Namespace) -> int:
    from whatif.opdb.merging import described, is_chosen
    from whatif.report.text_opdb import print_contributions

    store = the_store(args)
    contributions, damaged = store.contributions()
    device, family = device_name(args.device), family_name(args.family)
    chosen = [c.provenance for c in contributions if is_chosen(c.provenance, device, family)]
    show(
        args,
        lambda: {"database": str(store.folder), "contributions": [described(one) for one in chosen]},
        lambda: print_contributions(chosen, store.folder),
    )
    warn(damaged)
    return 0


def _export(args: argparse.Namespace) -> int:
    from whatif.opdb.merging import merge
    from whatif.opdb.store import Store
    from whatif.report.printable import printable

    store, target = the_store(args), Path(args.target)
    filters = _filters(args)
    if target.suffix == ".csv":
        from whatif.opdb.exporting import export_csv

        rows = export_csv(store, target, **filters)
        return show(
            args,
            lambda: {"file": str(target), "rows": rows},
            lambda: print(f"{printable(str(target))}: {counted(rows, 'row')} written"),
        )
    other = Store.open(target, create=True)
    return _move(args, "exporting", other.folder, partial(merge, store, other))


def _merge(args: argparse.Namespace) -> int:
    from whatif.opdb.merging import merge
    from whatif.opdb.store import Store

    source = Store.open(args.source)
    store = the_store(args, create=True)
    return _move(args, "merging", store.folder, partial(merge, source, store))


def _push(args: argparse.Namespace) -> int:
    from whatif.opdb.sharing import push

    return _move(args, "pushing", args.url, partial(push, the_store(args), args.url))


def _pull(args: argparse.Namespace) -> int:
    from whatif.opdb.sharing import pull

    store = the_store(args, create=True)
    return _move(args, "pulling", store.folder, partial(pull, args.url, store))


def _move(args: argparse.Namespace, label: str, where: Path | str, move: Callable[..., Merged]) -> int:
    """Copy contributions from one database to another, only of one device and family if these are named."""
    filters = _filters(args)
    with progress_bar(label) as progress:
        done = move(**filters, progress=progress)
    return _show_merged(args, done, where)


def _diff(args: argparse.Namespace) -> int:
    from whatif.opdb.merging import diff
    from whatif.opdb.store import Store
    from whatif.report.text_opdb import print_difference

    store, other = the_store(args), Store.open(args.other)
    found = diff(store, other)
    return show(
        args,
        lambda: {"first": str(store.folder), "second": str(other.folder), **found.to_dict()},
        lambda: print_difference(found, store.folder, other.folder),
    )


def _check(args: argparse.Namespace) -> int:
    from whatif.opdb.checking import check
    from whatif.report.text_opdb import print_check

    store = the_store(args)
    with progress_bar("checking") as progress:
        found = check(store, progress=progress)
    show(args, lambda: {"database": str(store.folder), **found.to_dict()}, lambda: print_check(found, store.folder))
    return 1 if found.problems else 0


def _evaluate(args: argparse.Namespace) -> int:
    from whatif.opdb.chain import ALL_SOURCES, AnswerSource
    from whatif.opdb.evaluate import SEED, SHARE, evaluate, evaluate_unseen_devices
    from whatif.report.text_opdb import print_evaluation
    from whatif.runtime.errors import WhatifError

    if args.unseen_device and (args.seed is not None or args.share is not None):
        raise WhatifError("opdb: expected --unseen-device without --seed and --share, which have no effect with it.")
    if args.errors is not None and not args.unseen_device:
        raise WhatifError("opdb: expected --unseen-device with --errors, got none.")
    sources = sorted(AnswerSource[name.upper()] for name in args.source) if args.source else ALL_SOURCES
    if args.model and not args.fit:
        raise WhatifError("opdb: expected --model with --fit, which fits the models.")
    if args.unseen_device and (args.family is not None or args.model):
        raise WhatifError("opdb: expected --unseen-device without --family and --model: it fits trees to all.")
    store, device = the_store(args), device_name(args.device)
    fit = _fit_for(args) if args.fit else None
    with progress_bar("reading") as progress:
        if args.unseen_device:
            found = evaluate_unseen_devices(store, sources=sources, device=device, progress=progress, fit=fit)
        else:
            found = evaluate(
                store, seed=SEED if args.seed is None else args.seed, share=args.share or SHARE, sources=sources,
                device=device, family=family_name(args.family), progress=progress, fit=fit,
            )  # fmt: skip
    if args.errors is not None:
        from whatif.opdb.evaluate import write_errors

        write_errors(found, Path(args.errors))
    return show(args, found.to_dict, lambda: print_evaluation(found))


def _fit_for(args: argparse.Namespace) -> Fit:
    """Return the function that fits models to measurements not held out: of a device itself, or across devices."""
    from whatif.cli.opdb_fit import kinds, training

    trainer, wanted, unseen = training(), kinds(args), args.unseen_device
    return lambda rest: trainer.in_memory(trainer.fit_models(rest, own=not unseen, across=unseen, kinds=wanted))
