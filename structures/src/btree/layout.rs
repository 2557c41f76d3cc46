//! What a cache must know of the tree's pages.

use farlink_runtime::{
    structure::{Layout, Overlap},
    words::Words,
};

use super::node::Node;
use crate::map::KeyRange;

/// The pages of a [`BTree`](super::BTree).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BTreeLayout;

impl Layout for BTreeLayout {
    type Region = KeyRange;

    #[inline]
    fn links(&self, page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        let node = Node(page);
        (0..node.count()).map(move |index| node.value_position(index))
    }

    fn below(&self, page: &(impl Words + ?Sized), link: usize) -> Option<KeyRange> {
        let node = Node(page);
        let index = (0..node.count()).find(|&index| node.value_position(index) == link)?;
        let low = if index == 0 { node.low() } else { node.key(index) };
        let high = if index + 1 < node.count() { Some(node.key(index + 1)) } else { node.high() };
        Some(KeyRange { low, high })
    }

    fn overlap(&self, page: &(impl Words + ?Sized), region: &KeyRange) -> Overlap {
        region.overlap(Node(page).low(), Node(page).high())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_tells_inside_from_shared_and_foreign() {
        let page = |low: u64, high: Option<u64>| {
            let mut words = vec![0u64; 32];
            (words[4], words[5]) = (low, high.unwrap_or(0));
            words[7] = if high.is_none() { 1 << 16 } else { 0 };
            words
        };
        let range = |low, high| KeyRange { low, high };
        let of = |page: &[u64], range: KeyRange| BTreeLayout.overlap(page, &range);
        assert_eq!(of(&page(10, Some(20)), range(10, Some(20))), Overlap::Inside);
        assert_eq!(of(&page(10, Some(20)), range(0, None)), Overlap::Inside);
        assert_eq!(of(&page(10, Some(20)), range(15, None)), Overlap::Partly);
        assert_eq!(of(&page(10, None), range(0, Some(50))), Overlap::Partly);
        assert_eq!(of(&page(10, Some(20)), range(20, None)), Overlap::Outside);
        assert_eq!(of(&page(20, None), range(0, Some(20))), Overlap::Outside);
        assert!(KeyRange::ALL.contains(u64::MAX) && !range(3, Some(5)).contains(5));
    }
}
