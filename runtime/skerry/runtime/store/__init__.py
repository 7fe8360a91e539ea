"""Object stores behind one interface of five verbs: read, create, replace, list, delete.

`Store` states the guarantees, and one conformance suite tests them for every implementation. Knows nothing of the
meaning of keys. Importing this package loads no client library or SDK; `open_store` loads the one it needs.
"""

from skerry.runtime.store.interface import Data, Entry, FolderStore, Profile, Span, Store, buffers_of, size_of
from skerry.runtime.store.open import CredentialProvider, list_folders, open_store

__all__ = [
    "CredentialProvider",
    "Data",
    "Entry",
    "FolderStore",
    "Profile",
    "Span",
    "Store",
    "buffers_of",
    "list_folders",
    "open_store",
    "size_of",
]
