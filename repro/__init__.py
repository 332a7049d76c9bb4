"""Five papers on batch size, memory and speed in CNN training, reproduced and ready to import.

The methods are `repro.mbs` and its siblings; importing `repro` loads none of them.
"""

__version__ = "0.1.0"
