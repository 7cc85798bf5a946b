"""What tests ask of processes."""


def is_schedulable(pid: int) -> bool:
    """Return whether a process is neither stopped nor a zombie; False where nobody can know it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in {b"T", b"t", b"Z", b"X"}
    except OSError:
        return False
