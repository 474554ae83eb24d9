//! What may go into a checkpointed block and come out of it: tensors, and containers of them.

use burn::tensor::{Bool, Int, Tensor};

/// Is handed each float tensor of a [`Tensors`].
pub trait TensorMapper {
    /// What stands in for `tensor`.
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D>;
}

/// Tensors that go into a checkpointed block or come out of it.
///
/// Implemented for tensors, tuples, arrays, `Vec` and `Option` of them; int and bool tensors pass as
/// they are, since they have no gradient. A struct implements it by passing on its fields, always in the
/// same order.
///
/// # Examples
///
/// ```
/// use burn::tensor::{Bool, Tensor};
/// use burn_shard_recompute::{TensorMapper, Tensors};
///
/// #[derive(Clone)]
/// struct Masked {
///     states: Tensor<3>,
///     padding: Tensor<2, Bool>,
/// }
///
/// impl Tensors for Masked {
///     fn map_tensors<M: TensorMapper>(self, mapper: &mut M) -> Self {
///         Self {
///             states: self.states.map_tensors(mapper),
///             padding: self.padding,
///         }
///     }
/// }
/// ```
pub trait Tensors: Sized {
    /// This value with each float tensor replaced by what `mapper` makes of it.
    fn map_tensors<M: TensorMapper>(self, mapper: &mut M) -> Self;
}

impl<const D: usize> Tensors for Tensor<D> {
    fn map_tensors<M: TensorMapper>(self, mapper: &mut M) -> Self {
        mapper.map(self)
    }
}

impl<const D: usize> Tensors for Tensor<D, Int> {
    fn map_tensors<M: TensorMapper>(self, _mapper: &mut M) -> Self {
        self
    }
}

impl<const D: usize> Tensors for Tensor<D, Bool> {
    fn map_tensors<M: TensorMapper>(self, _mapper: &mut M) -> Self {
        self
    }
}

impl<T: Tensors> Tensors for Option<T> {
    fn map_tensors<M: TensorMapper>(self, mapper: &mut M) -> Self {
        self.map(|tensors| tensors.map_tensors(mapper))
    }
}

impl<T: Tensors> Tensors for Vec<T> {
    fn map_tensors<M: TensorMapper>(self, mapper: &mut M) -> Self {
        let mapped = self.into_iter().map(|tensors| tensors.map_tensors(mapper));
        mapped.collect()
    }
}

impl<T: Tensors, const N: usize> Tensors for [T; N] {
    fn map_tensors<M: TensorMapper>(self, mapper: &mut M) -> Self {
        self.map(|tensors| tensors.map_tensors(mapper))
    }
}

macro_rules! tuples {
    ($(($($name:ident)*))*) => {$(
        impl<$($name: Tensors),*> Tensors for ($($name,)*) {
            #[allow(non_snake_case, unused_variables, clippy::unused_unit, reason = "of all lengths")]
            fn map_tensors<Mapper: TensorMapper>(self, mapper: &mut Mapper) -> Self {
                let ($($name,)*) = self;
                ($($name.map_tensors(mapper),)*)
            }
        }
    )*};
}

tuples! {
    ()
    (A)
    (A B)
    (A B C)
    (A B C D)
    (A B C D E)
    (A B C D E F)
    (A B C D E F G)
    (A B C D E F G H)
}
