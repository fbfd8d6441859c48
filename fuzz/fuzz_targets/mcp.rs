#![no_main]

libfuzzer_sys::fuzz_target!(init: plimsoll_fuzz::let_panics_be_contained(), |data: &[u8]| {
    (plimsoll_fuzz::target("mcp").run)(data);
});
