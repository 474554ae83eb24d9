//! Groups of calls: lengths are checked before each, and each group that is opened is closed.

use std::{
    ffi::{c_int, c_void},
    ptr,
};

use burn_shard_comm::{DType, ReduceOp};

use crate::{
    api::{RawComm, RawStream},
    error::NcclError,
    library::Nccl,
};

/// Bytes in a device's memory that a collective reads or writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

impl Span {
    fn pointer(self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(to_address(self.address))
    }
}

/// An open group of calls; closed when dropped.
///
/// Every call is unsafe for one reason: its spans have to be memory of the communicator's device that
/// lives, and is used by nobody else in a way that conflicts, until the stream has passed the group.
pub(crate) struct Group<'a> {
    nccl: &'a Nccl,
    world_size: usize,
    raw: RawComm,
    stream: RawStream,
    open: bool,
}

impl<'a> Group<'a> {
    /// # Safety
    ///
    /// `raw` is alive, nobody else calls it until the group ends, and `stream` is a stream of its device.
    pub(crate) unsafe fn start(
        nccl: &'a Nccl,
        world_size: usize,
        raw: RawComm,
        stream: u64,
    ) -> Result<Self, NcclError> {
        // SAFETY: closed by `end` or `drop`, on this thread: `Group` is neither Send nor Sync.
        let code = unsafe { (nccl.api.group_start)() };
        nccl.check("ncclGroupStart", code, raw)?;
        Ok(Self {
            nccl,
            world_size,
            raw,
            stream: ptr::with_exposed_provenance_mut(to_address(stream)),
            open: true,
        })
    }

    pub(crate) fn end(mut self) -> Result<(), NcclError> {
        self.open = false;
        // SAFETY: opened by `start`, on this thread.
        let code = unsafe { (self.nccl.api.group_end)() };
        self.nccl.check("ncclGroupEnd", code, self.raw)
    }

    /// # Safety
    ///
    /// See [`Group`].
    pub(crate) unsafe fn all_gather(&self, send: Span, receive: Span) -> Result<(), NcclError> {
        const FUNCTION: &str = "ncclAllGather";
        self.fits(
            FUNCTION,
            send,
            receive,
            send.bytes * self.world_size == receive.bytes,
        )?;
        // SAFETY: the lengths fit, the memory is as the caller says.
        let code = unsafe {
            (self.nccl.api.all_gather)(
                send.pointer(),
                receive.pointer(),
                send.bytes,
                BYTE,
                self.raw,
                self.stream,
            )
        };
        self.nccl.check(FUNCTION, code, self.raw)
    }

    /// # Safety
    ///
    /// See [`Group`].
    pub(crate) unsafe fn broadcast(
        &self,
        send: Span,
        receive: Span,
        root: usize,
    ) -> Result<(), NcclError> {
        const FUNCTION: &str = "ncclBroadcast";
        self.fits(FUNCTION, send, receive, send.bytes == receive.bytes)?;
        let root = to_int(root);
        // SAFETY: the lengths fit, the memory is as the caller says.
        let code = unsafe {
            (self.nccl.api.broadcast)(
                send.pointer(),
                receive.pointer(),
                send.bytes,
                BYTE,
                root,
                self.raw,
                self.stream,
            )
        };
        self.nccl.check(FUNCTION, code, self.raw)
    }

    /// # Safety
    ///
    /// See [`Group`].
    pub(crate) unsafe fn all_reduce(
        &self,
        send: Span,
        receive: Span,
        kind: Kind,
    ) -> Result<(), NcclError> {
        const FUNCTION: &str = "ncclAllReduce";
        self.fits(
            FUNCTION,
            send,
            receive,
            send.bytes == receive.bytes && kind.divides(send),
        )?;
        let numel = receive.bytes / kind.size_bytes;
        // SAFETY: the lengths fit, the memory is as the caller says.
        let code = unsafe {
            (self.nccl.api.all_reduce)(
                send.pointer(),
                receive.pointer(),
                numel,
                kind.dtype,
                kind.op,
                self.raw,
                self.stream,
            )
        };
        self.nccl.check(FUNCTION, code, self.raw)
    }

    /// # Safety
    ///
    /// See [`Group`].
    pub(crate) unsafe fn reduce_scatter(
        &self,
        send: Span,
        receive: Span,
        kind: Kind,
    ) -> Result<(), NcclError> {
        const FUNCTION: &str = "ncclReduceScatter";
        let fits = receive.bytes * self.world_size == send.bytes && kind.divides(receive);
        self.fits(FUNCTION, send, receive, fits)?;
        let numel = receive.bytes / kind.size_bytes;
        // SAFETY: the lengths fit, the memory is as the caller says.
        let code = unsafe {
            (self.nccl.api.reduce_scatter)(
                send.pointer(),
                receive.pointer(),
                numel,
                kind.dtype,
                kind.op,
                self.raw,
                self.stream,
            )
        };
        self.nccl.check(FUNCTION, code, self.raw)
    }

    fn fits(
        &self,
        function: &'static str,
        send: Span,
        receive: Span,
        fits: bool,
    ) -> Result<(), NcclError> {
        if fits {
            return Ok(());
        }
        Err(NcclError::Lengths {
            function,
            world_size: self.world_size,
            send_bytes: send.bytes,
            receive_bytes: receive.bytes,
        })
    }
}

impl Drop for Group<'_> {
    fn drop(&mut self) {
        if self.open {
            // SAFETY: opened by `start`, on this thread. Whoever left the group open has an error already.
            let _code = unsafe { (self.nccl.api.group_end)() };
        }
    }
}

/// `ncclUint8`: what is only moved is moved as bytes.
const BYTE: c_int = 1;

/// What a reduction does, in NCCL's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    dtype: c_int,
    op: c_int,
    size_bytes: usize,
}

impl Kind {
    /// None: NCCL has no 16-bit integers.
    pub(crate) const fn new(dtype: DType, op: ReduceOp) -> Option<Self> {
        let size_bytes = dtype.size_bytes();
        let dtype = match dtype {
            DType::I8 => 0,
            DType::U8 => 1,
            DType::I32 => 2,
            DType::U32 => 3,
            DType::I64 => 4,
            DType::U64 => 5,
            DType::F16 => 6,
            DType::F32 => 7,
            DType::F64 => 8,
            DType::BF16 => 9,
            DType::I16 | DType::U16 => return None,
        };
        let op = match op {
            ReduceOp::Sum => 0,
            ReduceOp::Max => 2,
            ReduceOp::Min => 3,
            ReduceOp::Mean => 4,
        };
        Some(Self {
            dtype,
            op,
            size_bytes,
        })
    }

    const fn divides(self, span: Span) -> bool {
        span.bytes.is_multiple_of(self.size_bytes)
    }
}

/// A rank or a number of ranks.
pub(crate) fn to_int(value: usize) -> c_int {
    c_int::try_from(value).expect("a group should have fewer ranks than a C int can count")
}

fn to_address(address: u64) -> usize {
    usize::try_from(address).expect("an address should fit this machine's")
}
