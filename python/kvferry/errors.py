"""What the adapters say of errors."""


def reason_of(error: BaseException) -> str:
    """For who asks why: a MemoryError may say nothing by itself."""
    return str(error) or type(error).__name__
