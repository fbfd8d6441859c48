//! Finds markers in text. Text passes unchanged, except an end that may be the start of a marker.

/// Watches for several markers. No marker may be a prefix of another.
#[derive(Debug)]
pub(crate) struct Watch {
    markers: &'static [&'static str],
    held: String,
}

impl Watch {
    pub fn new(markers: &'static [&'static str]) -> Self {
        Self { markers, held: String::new() }
    }

    /// Takes a character, and adds text that is certainly not a marker to `out`. Returns a marker that is now complete.
    pub fn step(&mut self, c: char, out: &mut String) -> Option<&'static str> {
        self.held.push(c);
        loop {
            let mut begins = self.markers.iter().filter(|marker| marker.starts_with(self.held.as_str()));
            match begins.next() {
                Some(marker) if marker.len() == self.held.len() => {
                    self.held.clear();
                    return Some(marker);
                }
                Some(_) => return None,
                None => {
                    let first = self.held.remove(0);
                    out.push(first);
                    if self.held.is_empty() {
                        return None;
                    }
                }
            }
        }
    }

    /// Takes the held text, when the text ends or the watch is over.
    pub fn take_held(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beginnings_are_held_and_released() {
        let mut watch = Watch::new(&["<a>", "<<b>"]);
        let (mut out, mut found) = (String::new(), Vec::new());
        for c in "x<<a><<b<<b><".chars() {
            found.extend(watch.step(c, &mut out));
        }
        assert_eq!((out.as_str(), found, watch.take_held().as_str()), ("x<<<b", vec!["<a>", "<<b>"], "<"));
    }
}
