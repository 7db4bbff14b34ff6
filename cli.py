"""Launcher for a checkout: `python cli.py generate "a red star on a striped blue background" --compare`."""

from elfatt_sd.cli import main

if __name__ == "__main__":
    main()
