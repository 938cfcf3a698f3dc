"""The one error type for settings that cannot work."""


class ConfigError(ValueError):
    """A setting, flag or config.json field that cannot work; the message says what would."""
