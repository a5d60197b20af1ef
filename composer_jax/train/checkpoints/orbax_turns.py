"""Lets the orbax saves of a process begin one after another.

Orbax numbers saves by one counter of the process, and what makes folders tells
what writes into them by that number. Two threads that begin a save at the same
time read each other's: both then wait, five minutes, for folders that were made
under another number, and fail. What a save goes on doing in orbax's own threads
has its number by then and overlaps with anything.

Of several processes all must begin their saves in one order, which no lock of
one of them gives: they let a `Sender` finish (`wait`) before they begin others.
"""

import threading

one_at_a_time = threading.Lock()
