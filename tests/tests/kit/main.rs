//! What tests are made of is tested itself: through its public surface, so that it is not built once more for its tests.

mod bounded;
mod deadlines;
mod drive;
mod fuzz;
mod search;
mod settings;
mod summary;
