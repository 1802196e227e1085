"""
What a tool imports as `common` if it is run by its path, and not, as it has to be, as a module.
"""
import sys
from pathlib import Path

sys.exit(f"error: from the folder of README.md, run: python -m tools.{Path(sys.argv[0]).stem}")
