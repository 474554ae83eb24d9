//! The programs are in `examples/`, each in one file that can be copied as it is. This library is empty; the code of
//! `docs/migration.md` is tested with it.

#![cfg_attr(doctest, doc = include_str!("../../../docs/migration.md"))]
