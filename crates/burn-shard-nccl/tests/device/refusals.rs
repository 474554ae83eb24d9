//! Segments that a communicator does not reach, and results of a group that has failed.

use std::{any::Any, sync::Arc};

use burn_shard_comm::{
    Collective, DType, Error, Local, OwnedSegments, ProcessGroup, ReduceOp, Segments,
};
use burn_shard_nccl_double::HostMemory;

use crate::{
    buffers::Buffers,
    common::{LONG, spawn},
};

#[test]
fn results_are_not_delivered_once_the_group_has_failed() {
    spawn(2, LONG, |group, memory| {
        let input = Arc::new(Buffers::full("input", &memory, &[&[1.0; 4]]));
        let work = group
            .communicator()
            .all_reduce(input, ReduceOp::Sum)
            .unwrap();
        let mut output = Buffers::full("output", &memory, &[&[0.0; 4]]);
        group.barrier().unwrap();
        group.abort("enough");
        let error = work.finish(&mut output).unwrap_err();
        assert!(error.to_string().contains("enough"), "{error}");
        assert!(output.log().is_empty());
    })
    .unwrap();
}

#[test]
fn what_does_not_fit_the_device_is_refused() {
    spawn(1, LONG, |group, memory| {
        let communicator = group.communicator();
        let refused = |error: Error| {
            assert!(error.is_refusal(), "{error}");
            error
        };
        let all_reduce_refused = |input: Arc<dyn Segments>| {
            let started = communicator.all_reduce(input, ReduceOp::Sum);
            refused(started.map(drop).unwrap_err())
        };
        let elsewhere = Arc::new(HostMemory::new(7));
        let input = Arc::new(Buffers::full("input", &elsewhere, &[&[1.0; 3]]));
        let error = all_reduce_refused(input);
        assert!(
            matches!(
                error,
                Error::OtherDevice {
                    expected: 0,
                    found: Some(7),
                    ..
                }
            ),
            "{error}"
        );

        let mut input = Buffers::full("input", &memory, &[&[1.0; 3]]);
        input.dtype = DType::I16;
        let error = all_reduce_refused(Arc::new(input));
        assert!(
            matches!(
                error,
                Error::UnsupportedDType {
                    dtype: DType::I16,
                    ..
                }
            ),
            "{error}"
        );

        let mut input = Buffers::full("input", &memory, &[&[1.0; 3]]);
        input.numels.push(3);
        let error = all_reduce_refused(Arc::new(input));
        assert!(
            matches!(
                error,
                Error::SegmentCountDiffers {
                    input: 2,
                    output: 1,
                    ..
                }
            ),
            "{error}"
        );

        let absent = Arc::new(Buffers::new("input", &memory, &[None], &[3]));
        let error = refused(communicator.all_gather(absent, &[3]).map(drop).unwrap_err());
        assert!(
            matches!(error, Error::AbsentSegment { segment: 0, .. }),
            "{error}"
        );

        let kind = OtherKind;
        let error = all_reduce_refused(Arc::new(kind));
        assert!(
            matches!(error, Error::OtherDevice { found: None, .. }),
            "{error}"
        );
        group.barrier().unwrap();
    })
    .unwrap();
}

#[test]
fn ranks_as_threads_refuse_segments_on_a_device() {
    Local::new(1)
        .spawn(|group: ProcessGroup| {
            let memory = Arc::new(HostMemory::new(0));
            let input = Arc::new(Buffers::full("input", &memory, &[&[1.0; 3]]));
            let error = group
                .communicator()
                .all_reduce(Arc::clone(&input) as _, ReduceOp::Sum);
            let error = error.map(drop).unwrap_err();
            assert!(error.is_refusal());
            assert!(
                matches!(
                    error,
                    Error::DeviceSegments {
                        collective: Collective::AllReduce,
                        ..
                    }
                ),
                "{error}"
            );
            let mut output = Buffers::full("output", &memory, &[&[1.0; 3]]);
            let host = Arc::new(OwnedSegments(vec![vec![1.0f32; 3]]));
            let error = group
                .communicator()
                .all_gather(host, &[3])
                .unwrap()
                .finish(&mut output)
                .unwrap_err();
            assert!(matches!(error, Error::DeviceSegments { .. }), "{error}");
        })
        .unwrap();
}

/// On a device that nobody here knows.
struct OtherKind;

impl Segments for OtherKind {
    fn dtype(&self) -> DType {
        DType::F32
    }
    fn count(&self) -> usize {
        1
    }
    fn numel(&self, _: usize) -> usize {
        1
    }
    fn bytes(&self, _: usize) -> Option<&[u8]> {
        None
    }
    fn device(&self) -> Option<&dyn Any> {
        Some(self)
    }
}
