"""For all processes of SGLang's: where ./dev puts it, behind this Python's own packages."""

import os
import sys

sys.path += filter(None, [os.environ.get("KVFERRY_TEST_SGLANG")])
