//! The programs are in `examples/`, each in one file that can be copied as it is. This library is empty.
