//! Writes the seeds and findings of a target into a folder: `cargo run -p plimsoll-fuzz --example seeds -- TARGET FOLDER`.

use plimsoll_fuzz::{seeds, target};

fn main() {
    let mut args = std::env::args().skip(1);
    let (Some(name), Some(folder)) = (args.next(), args.next()) else {
        eprintln!("usage: seeds TARGET FOLDER");
        std::process::exit(2);
    };
    let name = target(&name).name;
    std::fs::create_dir_all(&folder).expect("the folder can be made");
    for (file, bytes) in seeds::seeds(name).into_iter().chain(seeds::regressions(name)) {
        std::fs::write(format!("{folder}/{file}"), bytes).expect("a seed can be written");
    }
}
