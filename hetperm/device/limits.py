"""How large packets may be. Imports no torch, for programs that only look at sizes."""

LARGEST = 512 * 2**20  # bytes of a packet, unless the caller says otherwise
SLACK = 2**20  # bytes that a message or a request may have beside a packet
