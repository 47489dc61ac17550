"""Errors a user sees. Their text is one clear line: what was wrong, where, the value, what would be right."""


class HeadraceError(Exception):
    """Base of every error that is reported to the user as one line, without a traceback."""


class ConfigError(HeadraceError):
    """The configuration, or something it points to, cannot be used."""


class WireError(HeadraceError):
    """Bytes from the wire are not a message this version understands."""


class FencedError(HeadraceError):
    """This process was replaced by a newer incarnation and may not write any more."""
