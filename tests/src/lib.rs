//! What the integration tests share: calls with their tensors, backends, references and bounds.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`element`] | element types with a poison value that no computation makes |
//! | [`memory`] | a tensor in memory that is poisoned all around it |
//! | [`random`] | seeded normal and uniform values |
//! | [`case`] | one call with everything that it reads |
//! | [`backend`] | the implementations, behind one forward and one backward function |
//! | [`gpu`] | a call's tensors on a device |
//! | [`mod@reference`] | attention and its gradients by definition, one cell at a time |
//! | [`bound`] | how far a result may be from the reference |
//! | [`evidence`] | the record that a GPU run leaves |
//! | [`seeds`] | the worked examples of the seed documents, and what runs each |

pub mod backend;
pub mod bound;
pub mod case;
pub mod element;
pub mod evidence;
pub mod gpu;
pub mod memory;
pub mod random;
pub mod reference;
pub mod seeds;
