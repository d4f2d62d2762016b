"""`forebay verify`: is everything in this deployment that should be?"""

from __future__ import annotations

from forebay.cli._deployment import Deployment, deployment_options
from forebay.cli._options import CommandGroup
from forebay.cli._verifying import run_verify

__all__ = ["app"]

app = CommandGroup(help="Verify.")


@app.command("verify")
@deployment_options
def verify(deployment: Deployment) -> None:
    """Prove that nothing is missing or damaged.

    As `forebay log verify` for all topics: from objects and keys alone, with a list of orphans. Exit code 1
    where something is wrong; orphans do no harm.
    """
    run_verify(deployment, None)
