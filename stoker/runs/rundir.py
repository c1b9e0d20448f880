"""The old names of what is in directory, lock, result, resume, provenance and json_files: for callers that still use them."""

from stoker.command.shell import command, setting
from stoker.runs import json_files, resume
from stoker.runs.directory import ENDING, TYPED, WRITTEN, claim, make, remove_empty
from stoker.runs.json_files import MOST_BYTES as MOST_JSON
from stoker.runs.json_files import finite, is_number
from stoker.runs.lock import LOCK, held, is_held, lock, locks
from stoker.runs.provenance import revision, versions
from stoker.runs.result import MOST_OVERRIDES as MOST_SETTINGS
from stoker.runs.result import STAGES, RunResult, are_overrides, has_failed
from stoker.runs.resume import about, check_classes, check_data, check_same
from stoker.trainer.stopping import StopReason

__all__ = [
    "ENDING",
    "LOCK",
    "MOST_JSON",
    "MOST_SETTINGS",
    "STAGES",
    "TYPED",
    "WRITTEN",
    "about",
    "check_classes",
    "check_data",
    "check_same",
    "claim",
    "command",
    "finished",
    "finite",
    "has_failed",
    "held",
    "is_finished",
    "is_held",
    "is_list",
    "is_number",
    "is_whole",
    "lock",
    "locks",
    "make",
    "read_result",
    "remove_empty",
    "resume",
    "revision",
    "setting",
    "stopped",
    "versions",
    "write_json",
]  # fmt: skip


def write_json(path, contents):
    json_files.write_json(path, contents)


def read_result(path):
    return json_files.read_json(path)


def is_list(said):
    return isinstance(said, dict) and are_overrides(said.get("overrides"))


def is_whole(result):
    return isinstance(result, dict) and RunResult.parse(result).is_whole


def is_finished(result):
    return isinstance(result, dict) and RunResult.parse(result).is_finished


def finished(folder):
    result = json_files.read_json(f"{folder}/result.json")
    return result if is_finished(result) else None


def stopped(result):
    return RunResult.parse(result).stopped or StopReason("", "")
