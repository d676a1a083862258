"""What the process that loads torch runs: it finds foretrace, and leaves no trace of that on the path.

It is a file of its own: before Python 3.13 runs a text it imports modules, and looks for them in the present
folder first, where anybody may have put some.
"""

import os
import sys

if __name__ == "__main__":
    root, progress = sys.argv[1:]
    own = os.path.dirname(__file__)  # noqa: PTH120 - nothing is imported yet. Python has put it on the path
    sys.path[:] = [root, *(one for one in sys.path if one and one != own)]
    from foretrace.tracer.rehearse.world import child

    del sys.path[0]
    child.main(int(progress))
