"""Recognize an error which means that another process of the run is gone."""

import re

from stoker.trainer.launch import LostContact

# How gloo, NCCL and the store report that a peer is gone or does not respond.
CONTACT = re.compile(
    r"gloo|NCCL|nccl|TCPStore|ProcessGroup"
    r"|[Cc]onnection (closed|reset|refused)|Broken pipe|pair closure"
)


def is_lost(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, means that another rank is gone or not responding."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:  # an error may be its own context
        if isinstance(error, LostContact):
            return True
        if isinstance(error, RuntimeError) and CONTACT.search(str(error)):
            return True
        chain.append(error)
        error = error.__cause__ or error.__context__
    return False
