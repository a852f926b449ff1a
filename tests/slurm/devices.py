"""Which stand-in GPUs a process can open, tried from inside a job, a step or a shell on a node; how root opens them."""

from sandbox.driver import Driver

_CODE = """\
import glob, os
for device in sorted(glob.glob("/dev/muri-gpu*")):
    try:
        os.close(os.open(device, os.O_RDWR | os.O_NOCTTY))
    except PermissionError:
        continue
    print(device)
"""


def opener(driver: Driver) -> str:
    """Put a command for job scripts and steps into alice's home; it prints each GPU that it can open."""
    return f"python3 {driver.write('opens.py', _CODE)}"


def opened_by_step(driver: Driver, *options: str) -> list[str]:
    """Run a job with these options of srun and return the GPUs that its step could open."""
    return driver.run("srun", *options, *opener(driver).split(), on="login").stdout.split()


def grant(driver: Driver, job: int, comment: str, *changes: str) -> None:
    """Write the AdminComment of a job that is held, and release it, as the controller does."""
    driver.run("scontrol", "update", f"jobid={job}", f"admincomment={comment}", *changes, user="root")
    driver.run("scontrol", "release", str(job), user="root")
