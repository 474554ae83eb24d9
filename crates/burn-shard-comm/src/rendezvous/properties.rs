//! Random bytes and random messages: a few hundred of each, in every run of the tests.

use proptest::{collection::vec, prelude::*};

use super::{
    frame::first_message,
    handshake::Accepting,
    message::{JobFault, Join, MAX_REQUEST_BYTES, Reply, Request},
    secret::Secret,
    wire_checks,
};

/// Bytes that are close to what a rank sends: a hello, then a payload and a proof that is none.
fn almost_a_handshake() -> impl Strategy<Value = Vec<u8>> {
    let length = prop_oneof![0..40u16, 1000..1060u16, any::<u16>()];
    (vec(any::<u8>(), 0..1200), length, any::<(u8, u8)>()).prop_map(|(rest, length, (at, bit))| {
        let mut bytes = b"burnshrd\x02\x00".to_vec();
        bytes.extend_from_slice(&[7; 32]);
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(&rest);
        if at < 60 {
            bytes[usize::from(at) % 44] ^= 1 << (bit % 8);
        }
        bytes
    })
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        Just(Request::Arrive),
        (".{0,40}", vec(any::<u8>(), 0..2000)).prop_map(|(key, value)| Request::Set { key, value }),
        ".{0,40}".prop_map(|key| Request::Get { key }),
        any::<std::time::Duration>().prop_map(|waited| Request::GiveUp { waited }),
        ".{0,40}".prop_map(|message| Request::Report { message }),
        Just(Request::Bye),
    ]
}

fn reply() -> impl Strategy<Value = Reply> {
    let address = || any::<std::net::SocketAddr>();
    prop_oneof![
        (
            any::<[u8; 32]>(),
            vec(proptest::option::of(address()), 0..20)
        )
            .prop_map(|(session, listens)| Reply::Everyone { session, listens }),
        Just(Reply::Released),
        any::<bool>().prop_map(Reply::Stored),
        proptest::option::of(vec(any::<u8>(), 0..2000)).prop_map(Reply::Value),
        (any::<usize>(), address(), address()).prop_map(|(duplicate, first, second)| {
            Reply::Fault(JobFault::DuplicateRank {
                duplicate,
                first,
                second,
            })
        }),
    ]
}

/// `message` with the length before it, as it is sent.
fn framed(message: &impl serde::Serialize) -> Vec<u8> {
    let bytes = postcard::to_allocvec(message).unwrap();
    let mut framed = u32::try_from(bytes.len()).unwrap().to_le_bytes().to_vec();
    framed.extend(bytes);
    framed
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn no_bytes_admit_a_stranger(
        bytes in prop_oneof![almost_a_handshake(), vec(any::<u8>(), 0..1200)],
        cuts in vec(any::<u8>(), 0..8),
    ) {
        wire_checks::handshake(&bytes, &cuts);
    }

    #[test]
    fn any_bytes_are_a_message_or_refused(bytes in vec(any::<u8>(), 0..300)) {
        wire_checks::messages(&bytes);
        // With a length that fits, so that more than the length is looked at.
        let mut message = u32::try_from(bytes.len()).unwrap().to_le_bytes().to_vec();
        message.extend_from_slice(&bytes);
        wire_checks::messages(&message);
    }

    #[test]
    fn messages_arrive_as_they_were_sent_however_they_are_cut(
        requests in vec(request(), 1..6),
        replies in vec(reply(), 1..6),
        at in any::<prop::sample::Index>(),
    ) {
        let sent: Vec<u8> = requests.iter().flat_map(framed).collect();
        wire_checks::messages(&sent);
        wire_checks::messages(&replies.iter().flat_map(framed).collect::<Vec<u8>>());
        let (first, rest) = sent.split_at(at.index(sent.len()));
        let mut inbox = Vec::new();
        let mut received = Vec::new();
        for piece in [first, rest] {
            inbox.extend_from_slice(piece);
            while let Some(message) = first_message::<Request>(&mut inbox, MAX_REQUEST_BYTES).unwrap() {
                received.push(framed(&message));
            }
        }
        prop_assert!(inbox.is_empty());
        prop_assert_eq!(received, requests.iter().map(framed).collect::<Vec<_>>());
    }

    #[test]
    fn a_join_arrives_as_it_was_sent(
        rank in any::<usize>(),
        world_size in any::<usize>(),
        job_id in ".{0,100}",
        listens in proptest::option::of(any::<std::net::SocketAddr>()),
    ) {
        let bytes = postcard::to_allocvec(&Join { rank, world_size, job_id: job_id.clone(), listens }).unwrap();
        wire_checks::messages(&bytes);
        let join: Join = postcard::from_bytes(&bytes).unwrap();
        prop_assert_eq!((join.rank, join.world_size), (rank, world_size));
        prop_assert_eq!((join.job_id, join.listens), (job_id, listens));
    }
}

#[test]
fn an_accepting_end_wants_no_more_than_a_message_has() {
    let mut accepting = Accepting::new().unwrap();
    let secret = Secret::new(None);
    let mut answer = Vec::new();
    assert_eq!(accepting.wanted_bytes(), 42 + 2 + 1024 + 32 + 1);
    accepting
        .advance(b"burnshrd", &secret, &mut answer)
        .unwrap();
    assert_eq!(accepting.wanted_bytes(), 34 + 2 + 1024 + 32 + 1);
    assert!(answer.is_empty());
}
