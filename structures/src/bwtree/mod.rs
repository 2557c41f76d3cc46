//! A Bw-tree in disaggregated memory (Levandoski et al., ICDE 2013): pages are numbers, whose words in a mapping table lead to
//! chains of immutable records.

pub mod record;
