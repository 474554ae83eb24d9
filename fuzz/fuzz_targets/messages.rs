//! Bytes of a member of the job for either end of the store.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| burn_shard_comm::wire_checks::messages(data));
