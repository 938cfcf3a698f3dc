"""The version, once: the package, the wheel and the server's /version read it from here."""

__version__ = "0.1.0"
