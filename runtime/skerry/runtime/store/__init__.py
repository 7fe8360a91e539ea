"""The bucket, as five verbs. What every engine guarantees is written on `Store` and proved by one suite.

This package never knows what a key means. Importing it imports no engine and no cloud SDK: `open_store` does, for
the scheme it is given.
"""

from skerry.runtime.store.interface import Data, Entry, Profile, Span, Store, buffers_of, size_of
from skerry.runtime.store.opening import open_store

__all__ = ["Data", "Entry", "Profile", "Span", "Store", "buffers_of", "open_store", "size_of"]
