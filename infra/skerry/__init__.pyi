# For type checkers, which find a package of two source folders only if both have a file of it; see its `__init__.py`.
from skerry.runtime.export import load as load
