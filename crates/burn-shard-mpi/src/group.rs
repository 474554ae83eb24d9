//! [`process_group`]: what most programs need.
