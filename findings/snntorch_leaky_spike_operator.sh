#!/usr/bin/env bash
# snntorch 1.0.0, torch 2.13.0.
# Guess: surrogate.LSO() is a spike function like surrogate.SSO() and surrogate.atan(), with a leak below the threshold.
# Seen: LSO() calls the function of SSO() without one of its arguments, so its forward raises a TypeError. The function
# that the name promises, LeakySpikeOperator, returns one gradient for its two arguments, so its backward raises, too.
# No network trains with either. SSO() and atan() work.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy snntorch==1.0.0
cat >"$folder/run.py" <<'PY'
from importlib.metadata import version

import torch
from snntorch import surrogate

print("snntorch", version("snntorch"), "torch", torch.__version__)


def outcome(fire):
    x = torch.tensor([-1.0, -0.5, 0.5, 1.0], requires_grad=True)
    try:
        fire(x).sum().backward()
    except (TypeError, RuntimeError) as error:
        return type(error).__name__
    return "trains"


ways = {"atan": surrogate.atan(), "SSO": surrogate.SSO(), "LSO": surrogate.LSO()}
ways["LeakySpikeOperator"] = lambda x: surrogate.LeakySpikeOperator.apply(x, 0.1)
seen = {name: outcome(fire) for name, fire in ways.items()}
print(seen)
assert list(seen.values()) == ["trains", "trains", "TypeError", "RuntimeError"]
PY
"$folder/env/bin/python" -W ignore "$folder/run.py"
