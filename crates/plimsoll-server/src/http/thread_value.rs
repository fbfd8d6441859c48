//! A value that a thread has during some work.

use std::cell::RefCell;
use std::thread::LocalKey;

/// Does `work` on this thread with `value` in `place`, which is empty afterwards, even after a panic.
pub(crate) fn during<V: 'static, T>(
    place: &'static LocalKey<RefCell<Option<V>>>,
    value: Option<V>,
    work: impl FnOnce() -> T,
) -> T {
    struct Clear<V: 'static>(&'static LocalKey<RefCell<Option<V>>>);

    impl<V> Drop for Clear<V> {
        fn drop(&mut self) {
            self.0.set(None);
        }
    }

    place.set(value);
    let _clear = Clear(place);
    work()
}
