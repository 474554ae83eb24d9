//! The programs are in `examples/`, each in one file that can be copied as it is. This library is empty; the code in
//! the pages of `docs/` is tested with it.

#[cfg(doctest)]
mod book {
    #[doc = include_str!("../../../docs/checkpoints.md")]
    mod checkpoints {}
    #[doc = include_str!("../../../docs/choose-a-strategy.md")]
    mod choose_a_strategy {}
    #[doc = include_str!("../../../docs/concepts.md")]
    mod concepts {}
    #[doc = include_str!("../../../docs/get-started.md")]
    mod get_started {}
    #[doc = include_str!("../../../docs/migration.md")]
    mod migration {}
    #[doc = include_str!("../../../docs/mixed-precision.md")]
    mod mixed_precision {}
}
