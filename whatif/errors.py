"""The one exception that carries a sentence meant for the user."""


class WhatifError(Exception):
    """Could not do it. The message is one sentence: expected, got, where, what to do."""
