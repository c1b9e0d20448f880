"""The command line before torch is imported: trusted targets, help, the config's check, errors and exit codes."""

import argparse
import contextvars
import copy
import errno
import logging
import os
import re
import sys
import traceback
from pathlib import Path

from stoker import configs
from stoker.command import processes, settings
from stoker.trainer import launch, stopping
from stoker.trainer.errors import (
    RunInUse,
    TrainingError,
    UserError,
    as_typed,
    cause,
    did_you_mean,
    is_one_slip,
    nearest,
    printable,
)
from stoker.trainer.settings import Choice, Number

CONFIGS = Path(configs.__file__).parent
BUG, IN_USE = 1, 75
# What Hydra, and OmegaConf below it, raise for mistakes that they have no words for.
HYDRAS = (
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    IndexError,
    AssertionError,
    RecursionError,
)
LAUNCHERS = (
    "joblib",
    "submitit",
    "ray",
)  # which start the processes of a sweep's jobs, and miss them
codes = []  # of the errors reported so far
in_place_of_typed = contextvars.ContextVar(
    "in_place_of_typed", default=()
)  # where there is no command line
composed = {}  # the defaults of this process's runs
LONGEST = 500  # letters of a line that a user sees: a value or a path may have any number
# What a disk or a file system does to a training, as it were: everything else that it refuses is a mistake in a path.
FAILING = {
    getattr(errno, name, None)
    for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO", "ESTALE", "ENOMEM")
}
WHAT_TO_DO = {
    errno.ENOSPC: "Make room there, and type the same command with run_dir=DIR to go on.",
    getattr(
        errno, "EDQUOT", None
    ): "Make room there, and type the same command with run_dir=DIR to go on.",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f), and type the same command with run_dir=DIR.",
    errno.EROFS: "Type run_dir=DIR for a folder that can be written.",
    errno.EACCES: "Type another path, or change its permissions.",
    errno.ENAMETOOLONG: "Type a shorter path.",
}


def run(main):
    """Runs `main` and ends the process with an exit code.

    0 done, 2 the user's mistake, 3 the training failed, 75 the run directory is in use, 130 and 143 stopped by SIGINT
    and SIGTERM, 1 (with a traceback) a bug of ours.
    """
    try:
        code = answered(main)
    except KeyboardInterrupt:
        code = say_interrupted()
    except SystemExit as end:
        code = end.code
    finally:
        launch.leave()
    launch.end(code)


def answered(main):
    """Runs `main`, says what there is to say of its end, and gives the exit code; a signal is KeyboardInterrupt."""
    open_closed()
    launch.quieten()
    os.environ["HYDRA_FULL_ERROR"] = (
        "1"  # Hydra hands its errors on instead of printing them and exiting with 1
    )
    logging.getLogger("hydra").setLevel(logging.CRITICAL)  # its errors come as exceptions too
    argparse.ArgumentParser.error = refuse_option
    try:
        stopping.ready = True
        check_typed(CONFIGS, sys.argv[1:])
        if {"--help", "-h"} & set(sys.argv[1:]):
            print(help_text(CONFIGS))
        else:
            sys.argv[1:] = of_the_run(sys.argv[1:])
            main()
        sys.stdout.flush()
        if stopping.received is not None:  # its exception was lost in a library's code
            raise KeyboardInterrupt
        return max(codes, default=0)  # of the jobs of a sweep that failed
    except BrokenPipeError:
        return nobody_reads()
    except Exception as error:
        if is_interruption(error):
            raise KeyboardInterrupt from None
        if type(error).__module__.partition(".")[0] in LAUNCHERS:
            what = f"a job's process was lost: killed, or out of memory ({type(error).__name__})"
            return report(
                TrainingError(f"{what}.\nThe same command with hydra.sweep.dir=DIR goes on.")
            )
        from hydra.core.hydra_config import HydraConfig

        ours = isinstance(error, UserError)
        if isinstance(error, HYDRAS) and not ours and not HydraConfig.initialized():
            # Hydra lets a few mistakes through to the libraries below it, such as a key inside a list.
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            error = UserError(f"{' '.join(sys.argv[1:])}: this does not go together ({reason}).")
        return report(error)


def with_folder(arguments, usage, is_one, act):
    """Does `act(folder)` for `python -m stoker.MODULE DIR`, and gives the exit code.

    For a name that is none, the nearest folder beside it of those that `is_one` says yes to is proposed.
    """
    if {"-h", "--help"} & set(arguments):
        print(usage)
        return 0
    try:
        if len(arguments) != 1 or arguments[0].startswith("-"):
            raise UserError(f"Type {usage}")
        folder = Path(arguments[0])
        if not folder.is_dir():
            names = [path.name for path in folder.parent.glob("*") if is_one(path)]
            hint = did_you_mean(folder.name, names, whole=lambda name: str(folder.parent / name))
            raise UserError(f"{folder}: there is no such folder.{hint}")
        act(folder)
    except (UserError, OSError) as error:
        return report(error)
    return 0


def say_interrupted():
    """Says what to do after a signal, and gives its exit code."""
    sweep = {"-m", "--multirun"} & set(sys.argv)  # which has said how to go on
    text = "\ninterrupted." + " The same command begins again, or goes on." * (not sweep)
    code = stopping.exit_code()
    if launch.world_size() > 1:
        text, code = launch.last_words("signal", text, code)
    if text:
        print(text, file=sys.stderr, flush=True)
    return code


def is_interruption(error):
    """Whether an error is what became of a signal's exception that came in the middle of a library's code."""
    return stopping.received is not None and not isinstance(error, TrainingError)


def open_closed():
    """What a shell has closed (`>&-`) goes nowhere; Python has None for it, and the next file would get its number."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def nobody_reads():
    """After `| head`: what is still printed goes nowhere, also at the interpreter's end. A shell's code for SIGPIPE."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + 13


def report(error, note=None):
    """Prints the error as the user should see it, and gives its exit code.

    Of several processes one prints it, which then calls `note(code)` as well.
    """
    if isinstance(error, BrokenPipeError):
        return nobody_reads()
    code = exit_code(error)
    whole = "".join(traceback.format_exception(error)).rstrip()
    text = (
        whole if code == BUG else f"{whole}\n{message(error)}" if is_debugged() else message(error)
    )
    sys.stdout.flush()  # what was printed before it stands before it, also in a file
    if launch.world_size() > 1:
        lost = launch.is_lost(error)
        if lost and code == BUG:
            text, code = f"error: the contact to another process was lost.\n{cause(error)}", 3
        text, code = launch.last_words("lost" if lost else "error", text, code)
    codes.append(code)
    if text and not isinstance(error, processes.JobFailed):  # its processes have
        print(text, file=sys.stderr, flush=True)
    if text and note:
        note(code)
    return code


def is_debugged():
    """Whether debug=true was typed, also where no config came of what was typed."""
    return any(re.fullmatch(r"\+*debug=true", argument, re.IGNORECASE) for argument in sys.argv[1:])


def exit_code(error):
    """2 for the user's mistake, 3 for a training that failed, 75 for a directory in use, BUG for anything else."""
    if isinstance(error, RunInUse):
        return IN_USE
    if isinstance(error, processes.JobFailed):
        return error.code
    if isinstance(error, TrainingError) or (isinstance(error, OSError) and error.errno in FAILING):
        return 3
    # Ours and Hydra's may have no number.
    if isinstance(error, OSError) and (error.errno is None or error.filename is not None):
        return 2
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    return 2 if isinstance(error, (UserError, HydraException, OmegaConfBaseException)) else BUG


def message(error):
    """The one to three lines that a user sees, whatever is in a value, a path or a file: no control characters."""
    lines = [line for line in explanation(error).split("\n") if line.strip()][:3]
    lines = [
        line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
        for line in lines
    ]
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    return "\n".join(map(printable, lines)).encode(encoding, "backslashreplace").decode(encoding)


def reason(error):
    """Why a run has failed, as its result.json says it."""
    if exit_code(error) == BUG and not isinstance(error, processes.JobFailed):
        return cause(error)
    return "\n".join(map(printable, explanation(error).removeprefix("error: ").split("\n")))


def explanation(error):
    """What there is to say of an error: what was typed, what exists, what to type."""
    if isinstance(error, (UserError, TrainingError)):
        return f"error: {error}"
    if (
        isinstance(error, OSError) and error.errno
    ):  # Hydra's MissingConfigException is an OSError without a number
        place = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        reason = (error.strerror or str(error)).lower()
        return f"error: {place}{reason}.\n{WHAT_TO_DO.get(error.errno, '')}"
    options, missing, override = (
        getattr(error, name, None) for name in ("options", "missing_cfg_file", "override")
    )
    group, _, choice = (missing or "").rpartition("/")
    if group in settings.GROUPS_OF_MANY and options is None:  # in a list, of which Hydra says less
        folder = CONFIGS / group
        options = sorted(path.stem for path in folder.glob("*.yaml"))
    if options is not None and missing:
        if group == "hydra/sweeper" and choice in ("optuna", "ax"):
            return f"error: sweep={choice} needs Hydra's sweeper of that name.\nType pip install -e '.[{choice}]'."
        if group == "hydra/launcher":  # of those installed, the ones that we have tried
            own = {path.stem for path in (CONFIGS / group).glob("*.yaml")}
            options = [option for option in options if option in own | {"basic"}]
        return (
            f"error: {group}={choice}: there is no such choice.{did_you_mean(choice, options)}\n"
            f"Type {group}= one of: {', '.join(options)}."
        )
    cause = error.__cause__ or error
    key = getattr(cause, "full_key", None)
    if "is not in struct" in str(cause):
        return f"error: {no_such_key(key, cause.parent_node._get_root())}"
    if change := re.match(r"Could not (append|delete)\b.*?'([\w.@/-]+)'", str(cause), re.DOTALL):
        what, place = change.groups()
        if what == "delete":
            return f"error: ~{place}: there is no such key to leave out.\nType python train.py --help to see the keys."
        value = next((a.partition("=")[2] for a in sys.argv if a.startswith(f"+{place}=")), "...")
        return f"error: +{place}={value}: there is a key of this name, and + adds one. Type {place}={value}."
    if several := re.match(r"Ambiguous value for argument '(.*)'\n", str(error)):
        key, _, value = several[1].partition("=")
        if settings.record(key.lstrip("+")).path and not {"'", '"'} & set(value):
            path = f"\"{key.lstrip('+')}='{value}'\""
            return f"error: {several[1]}: several values are a sweep. Type {path} for one path with a comma in it."
        sweep, one = f"-m {several[1]}", f"'{key}=[{value}]'"
        return (
            f"error: {several[1]}: several values are a sweep. Type {sweep}, or for one list {one}."
        )
    if override is not None or "Error when parsing" in str(error):
        typed = override or str(error).partition("string: ")[2].partition(" out of")[0]
        open_ones = [
            pair for pair in ("()", "[]", "{}") if typed.count(pair[0]) != typed.count(pair[1])
        ]
        if open_ones:
            one, other = sorted(open_ones[0], key=typed.count, reverse=True)
            return (
                f"error: {typed}: a {one} in it has no {other}.\n"
                "As a part of a text, it wants quotes inside those of the shell: \"dataset.path='my(table.csv'\"."
            )
        return (
            f"error: {typed}: this is not understood. Settings are key=value, as in epochs=3, and lists 'key=[1,2]'.\n"
            "A value with unusual characters wants quotes inside those of the shell: \"dataset.path='my täble.csv'\"."
        )
    if key and (
        unknown := re.match(r"Key '\w+' not in '\w+'\.?(?: Did you mean: '(\w+)')?", str(cause))
    ):
        hint = f" Did you mean '{key.rpartition('.')[0]}.{unknown[1]}'?" if unknown[1] else ""
        return f"error: {key}: there is no such key of Hydra's.{hint}"
    if key:
        return f"error: {key}: {str(cause).splitlines()[0]}."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "error: " + "\n".join(lines[:3])


def no_such_key(key, config):
    """What to say of a key that there is not: where else there is one of that name, or the nearest name."""
    names = [name for name in flat(config) if not name.startswith("hydra")]
    group, _, last = key.rpartition(".")
    nearby = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == group}
    nearby |= {name.split(".")[0]: name.split(".")[0] for name in names} if not group else {}
    anywhere = {name.rpartition(".")[2]: name for name in reversed(names)}
    folder = CONFIGS / group
    files = sorted(folder.glob("*.yaml" if group else "*/*.yaml"))
    options = [path for path in files if f"\n{last}:" in path.read_text(encoding="utf-8")]
    aliases = {alias: name for name, one in settings.SETTINGS.items() for alias in one.aliases}
    near = nearest(last, nearby) or nearest(last, anywhere)
    if any(argument.startswith(f"{group}._target_=") for argument in sys.argv):
        hint = f" Type +{key}=... for an argument of your own {group}."
    elif group and options:
        hint = f" It is a key of {group}={options[0].stem}."
    elif options and anywhere.get(last, "callbacks.").startswith(
        "callbacks."
    ):  # hardly that of a callback is meant
        choice, place = options[0].stem, options[0].parent.name
        hint = f" It is a key of {place}={choice}: type {place}={choice} {place}.{last}=..."
    elif last in anywhere or last in aliases:
        hint = f" Did you mean {anywhere.get(last, aliases.get(last))!r}?"
    else:
        hint = f" Did you mean {nearby.get(near, anywhere.get(near))!r}?" if near else ""
    return f"{key}: there is no such key.{hint}\nType python train.py --help to see the keys."


def flat(config, prefix=""):
    """{"dotted.key": value} of nested mappings, without resolving anything."""
    from omegaconf import DictConfig, OmegaConf

    config = (
        OmegaConf.to_container(config, resolve=False) if isinstance(config, DictConfig) else config
    )
    items = ((f"{prefix}{key}", value) for key, value in config.items())
    return {
        name: value
        for key, item in items
        for name, value in (
            flat(item, f"{key}.") if isinstance(item, dict) and item else {key: item}
        ).items()
    }


def of_the_run(arguments):
    """The arguments; for a run of before, `dataset.root=DIR` also where its data set is not the default one."""
    if not {"task=evaluate", "task=predict", "task=export"} & set(arguments):
        return arguments
    return [
        f"++{argument}" if re.match(r"\w+\.[\w.]+=", argument) else argument
        for argument in arguments
    ]


def check_typed(configs, arguments):
    """UserError for what Hydra takes for an error of ours, or finds out once for each job of a sweep."""
    sweep = {"-m", "--multirun"} & set(arguments)
    if sweep and launch.world_size() > 1:
        raise UserError(
            "-m: a sweep starts runs by itself. Type python train.py -m ... strategy=ddp devices=N."
        )
    for argument in arguments:
        key, _, value = argument.partition("=")
        if re.fullmatch(
            r"-\w{3,}(\.\w+)*", key
        ):  # argparse would take -patience=1 for -p atience=1
            raise UserError(f"{argument}: settings have no dashes. Type {argument.lstrip('-')}.")
        if argument.startswith("="):
            raise UserError(
                f"{argument}: there is no key in front of the =. Settings are key=value, as in epochs=3."
            )
        if key == "run_dir" and sweep and value != "null":
            raise UserError(
                f"{argument}: this names one run. For a sweep, type hydra.sweep.dir=DIR."
            )
        if (
            re.match(r"(hydra/launcher|sweep([./].*)?)$", key)
            and not sweep
            and launch.world_size() == 1
        ):
            more = " seed=0,1" * (key == "hydra/launcher" or "." in key)
            raise UserError(
                f"{argument}: this is for the jobs of a sweep. Type -m as well, as in -m {argument}{more}."
            )
        if not key.strip("+~") or not (configs / key.lstrip("+")).is_dir():
            continue
        if key.startswith("+"):
            raise UserError(
                f"{argument}: this group has an option already, and + adds one. Type {argument.lstrip('+')}."
            )
        if "," in value and not sweep and value[0] != "[":
            raise UserError(f"{argument}: several options are a sweep. Type -m {argument}.")
        options = sorted(path.stem for path in (configs / key).glob("*.yaml"))
        if listed := re.fullmatch(r"\[(.*)\]", value):
            names = [name.strip() for name in listed[1].split(",") if name.strip()] or options
            if key in settings.GROUPS_OF_MANY:
                twice = next((name for name in names if names.count(name) > 1), None)
                if twice is not None:
                    raise UserError(f"{argument}: {twice} is in it twice. Type it once.")
                continue
            more = f", or for a sweep -m {key}={','.join(names if len(names) > 1 else options[:2])}"
            raise UserError(
                f"{argument}: this is a group, and takes one option. Type {key}={names[0]}{more}."
            )
        if value == "null" and key != "experiment":  # which is none by default
            raise UserError(
                f"{argument}: this is a group, and needs an option. Type {key}= one of: {', '.join(options)}."
            )


def refuse_option(parser, message):
    """UserError in place of argparse's nine lines; `--epochs=3` is what other programs would take."""
    option = re.search(r"unrecognized arguments: (-\S+)", message)
    if not option:
        raise UserError(f"{message}. Type python train.py --help.")
    name, _, value = option[1].partition("=")
    for known in ("--help", "--multirun", "--cfg"):
        if is_one_slip(name, known):
            raise UserError(f"{option[1]}: there is no such option. Did you mean {known!r}?")
    after = sys.argv[sys.argv.index(name) + 1 :] if name in sys.argv else []  # as in --model cnn
    value = value or (after[0] if after and not re.match("-|.*=", after[0]) else "...")
    setting = f"{name.lstrip('-').replace('-', '_')}={value}"
    raise UserError(
        f"{option[1]}: there is no such option. Settings have no dashes: type {setting}."
    )


def trusted(packages, arguments):
    """Hydra's patterns for `packages`, those of `trusted=[...]`, and the targets typed: what one types is one's own."""
    patterns = [f"{package}.*" for package in packages]
    for argument in arguments:
        key, _, value = argument.partition("=")
        names = re.findall(r"[\w.]+", value)
        if key == "trusted":
            patterns += [f"{name}.*" for name in names]
        elif key.endswith("_target_"):
            patterns += [pattern for name in names for pattern in (name, f"{name.split('.')[0]}.*")]
    return patterns


def typed():
    """The settings of this job as they were typed, their interpolations unresolved."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    if not HydraConfig.initialized():
        return [*in_place_of_typed.get()]
    return [
        *OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False),
        *in_place_of_typed.get(),
    ]


def typed_keys():
    """The keys of the settings that were typed."""
    return {override.partition("=")[0].lstrip("+") for override in typed()}


def defaults():
    """The config of this job's choices without any setting typed, its interpolations unresolved."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    choices = HydraConfig.get().runtime.choices.items()
    wanted = [
        f"{group}={choice}"
        for group, choice in choices
        if choice is not None and not group.startswith("hydra/")
    ]
    wanted += [
        override
        for override in typed()
        if override.startswith(tuple(f"{group}=[" for group in settings.GROUPS_OF_MANY))
    ]
    key = (GlobalHydra.instance().config_loader(), HydraConfig.get().job.config_name, *wanted)
    if key not in composed:  # the jobs of a sweep have the same choices, and Hydra takes 50 ms
        composed[key] = OmegaConf.to_container(hydra.compose(key[1], wanted), resolve=False)
    return copy.deepcopy(composed[key])


def put(config, values):
    """Puts {dotted key: value} into nested dicts."""
    for key, value in values.items():
        *groups, last = key.split(".")
        place = config
        for group in groups:
            place[group] = place = place.get(group) if isinstance(place.get(group), dict) else {}
        place[last] = value


def keep_texts(cfg):
    """Has what is a text be what was typed: run_dir=1e3 is a folder of this name, and no number."""
    for key, _, value in (override.partition("=") for override in typed()):
        if (
            isinstance(settings.record(key).limit, settings.Text | settings.Checked)
            and isinstance(cfg.get(key), (int, float))
            and not isinstance(cfg[key], bool)
        ):
            cfg[key] = value


def check_config(cfg):
    """UserError for a config that cannot be run.

    A value of another type than its default, a key at the top that there is not, a part that is missing, two lengths,
    or a value still to be given.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    given, there = OmegaConf.to_container(cfg, resolve=False), defaults()
    for key in given:
        if key not in there:
            raise UserError(no_such_key(key, there))
    for key in there:
        if key not in given:
            raise UserError(f"{key}: a run cannot do without it. Leave out ~{key}.")
    check_types("", given, there)
    keys = {override.partition("=")[0] for override in typed()}
    if {"epochs", "max_steps"} <= keys and None not in (given["epochs"], given["max_steps"]):
        raise UserError(
            f"max_steps={as_typed(given['max_steps'])} and epochs={as_typed(given['epochs'])} both give the length. "
            "Type one of them."
        )
    try:
        for key in sorted(OmegaConf.missing_keys(cfg)):
            raise UserError(f"{key}: this has no default. Type {key}=...")
        resolved = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    except RecursionError:
        cycle = next(
            (key for key, value in flat(cfg).items() if isinstance(value, str) and "${" in value),
            "a key",
        )
        raise UserError(f"{cycle}: its ${{...}} leads back to itself. Type a value.") from None
    try:
        check_types("", resolved, there)
        settings.check_all(resolved)
    except UserError as error:  # as it was typed: what comes from the environment may be a secret
        text = str(error)
        for key, value in flat(cfg).items():
            if isinstance(value, str) and "${" in value:
                text = text.replace(f"{key}={as_typed(flat(resolved).get(key))}", f"{key}={value}")
        raise UserError(text) from None


def check_types(prefix, given, defaults):
    """The default's type is the key's type. null and auto stand for any: what they take, the constructor knows."""
    for key, default in defaults.items():
        name, value = f"{prefix}{key}", given.get(key, default)
        if (
            default is None
            or default in ("auto", "???")
            or (isinstance(value, str) and "${" in value)
        ):
            continue
        if isinstance(default, str) and "${" in default:
            continue  # it follows another key, which is checked itself
        limit = settings.record(name).limit
        if isinstance(limit, Choice) and limit.has(value):  # some are not of the default's type
            continue
        if value is None:
            # null is no length where max_steps gives one, and leaves a callback out.
            top = name.removeprefix("trainer.")  # whose keys follow those of the top
            limit = settings.record(top).limit
            may_be = top == "epochs" or (isinstance(limit, Number) and limit.optional)
            if not may_be and not re.fullmatch(r"callbacks\.\w+", name):
                raise UserError(f"{name}=null: give a value, as in {name}={as_typed(default)}.")
            continue
        if isinstance(default, dict) and isinstance(value, dict):
            if value.get("_target_") == default.get(
                "_target_"
            ):  # the keys of another target have types of their own
                check_types(f"{name}.", value, default)
        elif isinstance(default, float):
            expect(
                name,
                value,
                isinstance(value, (int, float)) and not isinstance(value, bool),
                "a number",
                default,
            )
        elif isinstance(default, bool):
            expect(name, value, isinstance(value, bool), "true or false", default)
        elif isinstance(default, int):
            expect(
                name,
                value,
                isinstance(value, int) and not isinstance(value, bool),
                "a whole number",
                default,
            )
        elif isinstance(default, list):
            expect(name, value, isinstance(value, list), "a list", default)
        elif isinstance(default, str):
            expect(name, value, isinstance(value, str), "a text", default)
        elif not isinstance(value, dict):
            one = f"{name}.{next(iter(default), 'KEY')}=..."
            raise UserError(
                f"{name}={as_typed(value)}: give a group of keys, {name}={{...}}, or one as {one}"
            )


def expect(name, value, ok, kind, default):
    if not ok:
        raise UserError(f"{name}={as_typed(value)}: give {kind}, as in {name}={as_typed(default)}.")


def help_text(configs):
    """What there is to set: the groups with their options, then the keys of train.yaml with its comments."""
    lines = [
        "Train a model:  python train.py [key=value ...] [group=option ...]",
        "",
        "  python train.py                                   the default: an MLP on handwritten digits, in seconds",
        "  python train.py model=cnn device=cuda epochs=3    any key from the command line",
        "  python train.py -m model=linear,mlp seed=0,1,2    a sweep: every combination, and a table of them",
        "  python train.py -m sweep=optuna                   a search: each trial is proposed from those before it",
        "  python train.py run_dir=runs/mine                 a named run; the same command again continues it",
        "  python train.py task=lr_find model=cnn            find a learning rate",
        "  python train.py model=cnn --cfg job               show the whole config and train nothing",
        "",
        "Groups (group=option; the keys of an option, each with a comment, are in configs/<group>/<option>.yaml):",
    ]
    for folder in sorted({path.parent for path in configs.rglob("*/*.yaml")}):
        options = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        lines.append(f"  {folder.relative_to(configs).as_posix():<16}{options}")
    text = (configs / "train.yaml").read_text(encoding="utf-8")
    keys = "task:" + text.split("\ntask:", 1)[1].split("\nhydra:")[0]
    indented = ("  " + line if line else "" for line in keys.splitlines())
    return "\n".join([*lines, "", "Keys (key=value), with their defaults:", *indented])
