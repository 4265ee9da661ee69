"""The one error type a user of draftgraph ever has to catch."""

from __future__ import annotations


class DraftgraphError(ValueError):
    """Bad input: a checkpoint, bundle, prompt or option that cannot be used as it is.

    The message is one paragraph that says what was found, what was expected and what to do.
    The command line prints it and exits with code 2.
    """
