//! Tables that stay in the model's files: the same bits as from memory, whatever the cache holds.

use plimsoll_device::cpu::TableReads;
use plimsoll_device::{Declare, DtypePolicy, TablePlace};

use crate::common::{Part, Rig, checkpoint};

/// Models with tables of n-grams, per layer, or of tokens; as floats, blocks, and codes with scales and biases apart.
const MODELS: [&str; 6] =
    ["qwen4-exp", "gemma4-e2b", "gguf-gemma4-e2b-q8_0", "mlx-gemma4-e2b-4bit", "gguf-llama-q4_0", "llama-f16"];

/// Runs a prompt in two chunks, with the tokens of another sequence beside the second.
fn run(rig: &mut Rig) -> Vec<Vec<u32>> {
    let tokens: Vec<u32> = (0..230u32).map(|i| 5 + i * i % 97 % 31 + i % 3 * 40).collect();
    let (first, second) = tokens.split_at(150);
    let mut logits = rig.step(&[Part::new(first, 0, None, 1)]);
    let other = Part { sequence: 1, ..Part::new(&tokens[20..60], 0, None, 3) };
    logits.extend(rig.step(&[Part::new(second, first.len(), Some(1), 2), other]));
    logits.into_iter().map(|row| row.into_iter().map(f32::to_bits).collect()).collect()
}

#[test]
fn tables_in_files_give_the_same_bits_with_any_cache() {
    for model in MODELS {
        let expected = run(&mut Rig::with(model, false, DtypePolicy::Auto));
        for cache_bytes in [0, 5_000, 1 << 30] {
            let mut rig = Rig::in_files(model, cache_bytes);
            assert_eq!(run(&mut rig), expected, "{model} behind {cache_bytes} bytes");
            let TableReads { cached, read } = rig.table_reads();
            assert!(cached > 0 && read > 0, "{model}: {cached} rows from the cache, {read} from the file");
            assert_eq!(run(&mut rig), expected, "{model} behind {cache_bytes} bytes, again");
            let again = rig.table_reads();
            assert_eq!(again.cached + again.read, cached + read);
            if cache_bytes == 1 << 30 {
                assert_eq!(again.read, 0, "{model}: a cache of the whole table is asked a second time");
            }
        }
    }
}

/// Rounding to bf16 would change the values of float tables, so these are loaded into memory.
#[test]
fn tables_that_are_rounded_stay_in_memory() {
    for (model, tables) in [("llama-f16", 0), ("gemma4-e2b", 1), ("qwen4-exp", 3)] {
        let checkpoint = checkpoint(model);
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Bf16).with_tables_in(TablePlace::File);
        plimsoll_models::build(&checkpoint.config, &mut declare, false).expect("it is declared");
        assert_eq!(declare.finish().file_tables().len(), tables, "{model}");
    }
}

#[test]
fn only_tables_that_are_looked_up_stay_in_files() {
    let declared = |model: &str, tables| {
        let checkpoint = checkpoint(model);
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto).with_tables_in(tables);
        plimsoll_models::build(&checkpoint.config, &mut declare, false).expect("it is declared");
        declare.finish()
    };
    let rows = |model, tables| -> Vec<(usize, usize)> {
        declared(model, tables).file_tables().iter().map(|table| (table.rows, table.row_bytes)).collect()
    };
    // Two layers look n-grams up in bf16; the model's own embedding is not its head.
    assert_eq!(rows("qwen4-exp", TablePlace::Auto), [(416, 16), (480, 16)]);
    assert_eq!(rows("qwen4-exp", TablePlace::File).len(), 3);
    assert_eq!(rows("qwen4-exp", TablePlace::Memory), []);
    // The embedding is also the head: it stays in memory.
    assert_eq!(rows("gemma4-e2b", TablePlace::File), [(384, 2 * 192)]);
    assert_eq!(rows("gemma4-e2b", TablePlace::Auto), []);
    assert_eq!(rows("llama-tied", TablePlace::File), []);
    // Eight bits and a scale of 16 for each block of 32.
    assert_eq!(rows("gguf-gemma4-e2b-q8_0", TablePlace::File), [(384, 192 / 32 * 34)]);
    let (whole, less) = (declared("gemma4-e2b", TablePlace::Memory), declared("gemma4-e2b", TablePlace::File));
    assert!(less.bytes + 384 * 192 * 2 <= whole.bytes, "{} of {} bytes in memory", less.bytes, whole.bytes);
}
