//! Forwards and backwards in other than the usual order, parameters that are read often, and threads.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn_shard::{MemoryKind, ShardedModule, ShardingStrategy};

use crate::common::{
    assert_bits, assert_near, bits, device, gathered_gradients, gradients, plain_dp_gradients,
};
use crate::pair::{Net, Pair, WIDTH, assert_says, for_all, outcome, small_groups, spawn, x};

/// Its gradients are those of the plain module, or the backward is refused with the way out.
#[test]
fn two_forwards_and_then_their_two_backwards_equal_the_plain_module_or_say_what_to_do_instead() {
    for_all(|group, strategy| {
        let pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        let losses = [0, 1].map(|step| pair.model.loss(x(group, step)));
        let plain = [0, 1].map(|step| pair.plain.loss(x(group, step)));
        for (step, (own, plain)) in losses.into_iter().zip(plain).enumerate() {
            match outcome(|| own.backward()) {
                Err(message) => {
                    assert_says(&message, &["ombine losses"]);
                    return;
                }
                Ok(grads) => {
                    let grads = GradientsParams::from_grads(grads, &pair.model);
                    let expected = plain_dp_gradients(&plain, &pair.plain, group);
                    assert_bits(
                        &pair.what(),
                        step,
                        &gathered_gradients(&pair.model, &grads),
                        &gradients(&pair.plain, &expected),
                    );
                }
            }
        }
    });
}

#[test]
fn the_sum_of_the_losses_of_three_forwards_equals_the_plain_module() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        for step in 0..3 {
            pair = pair.step(|net| {
                let [first, second, third] =
                    [0, 10, 20].map(|more| net.loss(x(group, step + more)));
                first + second + third
            });
        }
    });
}

#[test]
fn a_part_of_the_graph_that_is_dropped_before_backward_changes_nothing() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        for step in 0..3 {
            pair = pair.step(|net| {
                let x = x(group, step);
                drop(net.third.forward(gelu(net.second.forward(x.clone()))));
                let y = net.first.forward(x);
                drop(net.third.forward(y.clone()));
                net.third.forward(gelu(y)).mean()
            });
        }
    });
}

#[test]
fn an_evaluation_between_forward_and_backward_changes_nothing() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        for step in 0..3 {
            pair = pair.step(|net| {
                let loss = net.loss(x(group, step));
                // Without a graph, and with one that is dropped.
                let _plain = net.valid().loss(x(group, 8).without_autodiff());
                drop(net.loss(x(group, 9)));
                loss
            });
        }
    });
}

#[test]
fn an_evaluation_whose_graph_is_kept_beyond_the_step_changes_nothing() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        let mut kept = Vec::new();
        for step in 0..3 {
            kept.push(pair.model.loss(x(group, 7)));
            pair = pair.step(|net| net.loss(x(group, step)));
        }
    });
}

/// Not bits: where reads lie at different depths, or one of them is used twice, Burn may add up their gradients
/// in another order.
#[test]
fn gradients_of_reads_in_branches_of_different_depth_are_those_of_burn_but_for_rounding() {
    for_all(|group, strategy| {
        let pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        let loss = |net: &Net| {
            let w = &net.first;
            let shallow = w.forward(x(group, 0));
            let mut deep = x(group, 1);
            for _ in 0..4 {
                deep = gelu(w.forward(gelu(net.second.forward(deep))));
            }
            let between = w.forward(gelu(gelu(gelu(x(group, 2)))));
            let squares = w.weight.val().powi_scalar(2).mean();
            (shallow * deep + between.powi_scalar(3)).mean() + squares
        };
        let (own, plain) = (loss(&pair.model), loss(&pair.plain));
        assert_eq!(bits(own.clone()), bits(plain.clone()));
        let grads = GradientsParams::from_grads(own.backward(), &pair.model);
        let expected = plain_dp_gradients(&plain, &pair.plain, group);
        assert_near(
            &pair.what(),
            0,
            &gathered_gradients(&pair.model, &grads),
            &gradients(&pair.plain, &expected),
        );
    });
}

/// A parameter that is read at the same depth many times, as by a recurrent layer's input.
#[test]
fn many_reads_at_one_depth_are_added_up_as_burn_does() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        for step in 0..2 {
            pair = pair.step(|net| {
                let outputs = (0..7).map(|i| net.first.forward(x(group, step + 3 * i)));
                (Tensor::cat(outputs.collect(), 0) - 1.0)
                    .powi_scalar(2)
                    .mean()
            });
        }
    });
}

/// Sums have to be made as gradients come: plain Burn keeps about two as well.
#[test]
fn a_layer_used_64_times_keeps_no_more_than_a_few_gradients_of_its_weight() {
    const SIZE: usize = 256;
    for strategy in ShardingStrategy::ALL {
        for world_size in [1, 2] {
            spawn(world_size, |group| {
                let device = device();
                let layer = LinearConfig::new(SIZE, SIZE).with_bias(false).init(&device);
                let model = ShardedModule::<Linear>::new(layer, strategy, group).unwrap();
                let parameters = SIZE * SIZE * size_of::<f32>();
                model.reset_memory_peak();
                let mut x = Tensor::<2>::ones([1, SIZE], &device);
                for _ in 0..64 {
                    x = gelu(model.forward(x));
                }
                let _grads = x.mean().backward();
                let peak = model.memory().of(MemoryKind::Gradients).peak_bytes;
                assert!(
                    peak <= 4 * parameters,
                    "{strategy} of {world_size}: gradients of {peak} bytes at a time, of a parameter of {parameters}"
                );
            });
        }
    }
}

/// A rank whose part of the data set is shorter than the others'.
#[test]
fn an_empty_batch_on_one_rank_counts_as_zeros() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        for step in 0..3 {
            pair = pair.step(|net| {
                let rows = if group.rank() == group.world_size() - 1 {
                    0
                } else {
                    3
                };
                let x = x(group, step).slice([0..rows, 0..WIDTH]);
                // A sum: the mean of nothing is not a number.
                (net.forward(x) - 1.0).powi_scalar(2).sum() / 18.0
            });
        }
    });
}

/// Halves of a batch, on two threads of one rank. Under `Full` ranks have to read in the same order, which
/// threads do not promise: there it may be refused.
#[test]
fn two_threads_of_a_rank_that_build_one_loss_equal_the_plain_module_or_are_told() {
    for strategy in ShardingStrategy::ALL {
        for attempt in 0..10 {
            spawn(2, |group| {
                let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
                let losses = outcome(|| {
                    std::thread::scope(|scope| {
                        let model = &pair.model;
                        let threads = [0, 1].map(|half| {
                            scope.spawn(move || model.loss(x(model.group(), attempt + 20 * half)))
                        });
                        threads.map(|thread| {
                            thread.join().map_err(|payload| {
                                payload
                                    .downcast_ref::<String>()
                                    .cloned()
                                    .unwrap_or_default()
                            })
                        })
                    })
                });
                let own = losses.and_then(|[first, second]| {
                    let loss = first? + second?;
                    outcome(|| loss.backward())
                });
                match own {
                    Err(message) => {
                        assert_eq!(strategy, ShardingStrategy::Full, "{message}");
                        assert_says(&message, &["every rank"]);
                    }
                    Ok(grads) => {
                        let [first, second] =
                            [0, 1].map(|half| pair.plain.loss(x(group, attempt + 20 * half)));
                        let expected = plain_dp_gradients(&(first + second), &pair.plain, group);
                        let grads = GradientsParams::from_grads(grads, &pair.model);
                        assert_bits(
                            &pair.what(),
                            attempt,
                            &gathered_gradients(&pair.model, &grads),
                            &gradients(&pair.plain, &expected),
                        );
                        pair.model = pair.oss.step(0.1, pair.model, grads);
                        pair.plain = pair.stock.step(0.1, pair.plain, expected);
                        pair.compare();
                    }
                }
            });
        }
    }
}

#[test]
fn a_backward_on_another_thread_than_the_forward_equals_the_plain_module() {
    for_all(|group, strategy| {
        let mut pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
        for step in 0..2 {
            let loss = pair.model.loss(x(group, step));
            let expected = pair.plain.loss(x(group, step));
            assert_eq!(bits(loss.clone()), bits(expected.clone()));
            let grads = std::thread::scope(|scope| scope.spawn(|| loss.backward()).join().unwrap());
            let grads = GradientsParams::from_grads(grads, &pair.model);
            let expected = plain_dp_gradients(&expected, &pair.plain, group);
            pair.model = pair.oss.step(0.1, pair.model, grads);
            pair.plain = pair.stock.step(0.1, pair.plain, expected);
            pair.compare();
        }
    });
}
