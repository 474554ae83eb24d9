//! The scope tells forward from recomputation, and calls back once.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_shard_recompute::scope::{self, Phase};
use burn_shard_recompute::{Random, checkpoint_with};

fn block() -> (Device, Linear, Tensor<2>) {
    let device = Device::flex().autodiff();
    let linear = LinearConfig::new(2, 2).init(&device);
    let x = Tensor::ones([1, 2], &device).require_grad();
    (device, linear, x)
}

/// Counts a callback of the running block.
fn count(calls: &Arc<AtomicUsize>) {
    if scope::phase() == Some(Phase::Forward) {
        let calls = Arc::clone(calls);
        scope::on_recomputed(Box::new(move || {
            calls.fetch_add(1, SeqCst);
        }));
    }
}

#[test]
fn a_block_runs_in_forward_and_in_recompute() {
    let _alone = common::alone();
    let (_, linear, x) = block();
    let phases = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&phases);
    let y = checkpoint_with(Random::Ignore, &linear, x, move |linear, x| {
        seen.lock().unwrap().push(scope::phase());
        linear.forward(x)
    });
    assert_eq!(scope::phase(), None);
    assert_eq!(*phases.lock().unwrap(), [Some(Phase::Forward)]);
    y.sum().backward();
    assert_eq!(scope::phase(), None);
    assert_eq!(
        *phases.lock().unwrap(),
        [Some(Phase::Forward), Some(Phase::Recompute)]
    );
}

#[test]
fn a_callback_runs_once_when_the_block_has_run_again() {
    let _alone = common::alone();
    let (_, linear, x) = block();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let y = checkpoint_with(Random::Ignore, &linear, x, move |linear, x| {
        count(&counted);
        assert_eq!(counted.load(SeqCst), 0, "before the block has run again");
        linear.forward(x)
    });
    assert_eq!(calls.load(SeqCst), 0);
    let _grads = y.clone().sum().backward();
    assert_eq!(calls.load(SeqCst), 1);
    drop(y);
    assert_eq!(calls.load(SeqCst), 1);
}

#[test]
fn a_block_has_one_id_in_forward_and_recompute_and_others_have_others() {
    let _alone = common::alone();
    let (_, linear, x) = block();
    let ids = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&ids);
    let forward = move |linear: &Linear, x| {
        seen.lock()
            .unwrap()
            .push((scope::block(), scope::recomputed_block()));
        linear.forward(x)
    };
    let y = checkpoint_with(Random::Ignore, &linear, x, forward.clone());
    let y = checkpoint_with(Random::Ignore, &linear, y, forward);
    let _grads = y.sum().backward();
    let ids = ids.lock().unwrap();
    let [(first, None), (second, None), again @ ..] = ids.as_slice() else {
        panic!("{ids:?}");
    };
    assert_ne!(first, second);
    assert_eq!(again, [(*second, *second), (*first, *first)]);
}

#[test]
fn a_callback_runs_once_when_no_backward_comes() {
    let _alone = common::alone();
    let (device, linear, x) = block();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let forward = move |linear: &Linear, x| {
        count(&counted);
        linear.forward(x)
    };
    drop(checkpoint_with(Random::Ignore, &linear, x, forward));
    // Burn takes abandoned nodes off its tape while it runs other backwards.
    for _ in 0..8 {
        Tensor::<1>::ones([1], &device)
            .require_grad()
            .exp()
            .backward();
    }
    assert_eq!(calls.load(SeqCst), 1);
}

#[test]
fn a_callback_runs_when_the_forward_panics() {
    let _alone = common::alone();
    let (_, linear, x) = block();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        checkpoint_with(
            Random::Ignore,
            &linear,
            x,
            move |_, _: Tensor<2>| -> Tensor<2> {
                count(&counted);
                panic!("on purpose")
            },
        )
    }));
    assert!(caught.is_err());
    assert_eq!((calls.load(SeqCst), scope::phase()), (1, None));
}

#[test]
fn nested_blocks_have_scopes_of_their_own() {
    let _alone = common::alone();
    let (_, linear, x) = block();
    let phases = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&phases);
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let y = checkpoint_with(Random::Ignore, &linear, x, move |linear, x| {
        let (seen, counted) = (Arc::clone(&seen), Arc::clone(&counted));
        let y = checkpoint_with(Random::Ignore, linear, x, move |linear, x| {
            seen.lock().unwrap().push(scope::phase());
            count(&counted);
            linear.forward(x)
        });
        assert!(scope::phase().is_some());
        y
    });
    y.sum().backward();
    use Phase::{Forward, Recompute};
    assert_eq!(
        *phases.lock().unwrap(),
        [Some(Forward), Some(Forward), Some(Recompute)]
    );
    // One for the outer forward, one for the inner forward in the outer recomputation.
    assert_eq!(calls.load(SeqCst), 2);
}

#[test]
#[should_panic(expected = "outside the forward")]
fn a_callback_outside_a_forward_is_refused() {
    let _alone = common::alone();
    scope::on_recomputed(Box::new(|| ()));
}
