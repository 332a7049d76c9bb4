"""``python -m simulated_device ARGUMENTS`` runs ``python -m repro ARGUMENTS`` where the device is.

Such as ``PYTHONPATH=tests python -m simulated_device run mbs --profile smoke --device sim``; with
``smoke`` alone, all of that profile under the race checker.
"""

import sys

import simulated_device

simulated_device.load()

if __name__ == "__main__":
    from repro.__main__ import main
    from simulated_device import smoke
    from simulated_device.checking import present

    with present():
        if sys.argv[1:] == ["smoke"]:
            raise SystemExit(smoke.everything())
        main()
