//! Bytes of a stranger for the accepting end of the handshake: the first byte says how many that follow are
//! lengths of pieces, the rest is sent.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&count, rest)) = data.split_first() else {
        return;
    };
    let (cuts, bytes) = rest.split_at(usize::from(count % 16).min(rest.len()));
    burn_shard_comm::wire_checks::handshake(bytes, cuts);
});
