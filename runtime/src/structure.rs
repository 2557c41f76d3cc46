//! What the framework knows of a structure.

use crate::{
    page::{SizeClass, StructureId},
    ptr::RemotePtr,
};

/// A structure in the catalog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Structure {
    /// Its number in the cluster, on each of its pages.
    pub id: StructureId,
    /// Its name: 1 to 64 bytes.
    pub name: String,
    /// Which plug-in it belongs to.
    pub kind: u32,
    /// The size of its pages; of its root, if it uses several.
    pub class: SizeClass,
    /// Its root page. A root grows and shrinks in place, so this never changes.
    pub root: RemotePtr,
}
