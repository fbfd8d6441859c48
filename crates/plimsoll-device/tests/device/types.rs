//! Every quantized type of GGUF on the device: packed weights keep the file's values bit for bit, in memory of a known size.

use std::path::Path;

use crate::common::{device, rows, shape};
use plimsoll_device::{Declare, Device, DtypePolicy, Isa};
use plimsoll_formats::{Checkpoint, RowBuf};

/// Types, and the bits that an element of each takes in memory.
type Types = &'static [(&'static str, f64)];

/// Files, their columns and types.
const FILES: [(&str, usize, Types); 2] = [
    (
        "types.gguf",
        256,
        &[
            ("Q4_0", 4.5),
            ("Q4_1", 5.0),
            ("Q5_0", 5.5),
            ("Q5_1", 6.0),
            ("Q8_0", 8.5),
            ("Q2_K", 3.125),
            ("Q3_K", 3.5625),
            ("Q4_K", 4.625),
            ("Q5_K", 5.625),
            ("Q6_K", 6.5625),
        ],
    ),
    (
        "codebooks.gguf",
        512,
        &[
            ("IQ4_NL", 4.5),
            ("IQ4_XS", 4.3125),
            ("IQ3_S", 4.3125),
            ("IQ3_XXS", 4.375),
            ("IQ2_S", 3.625),
            ("IQ2_XS", 3.625),
            ("IQ2_XXS", 3.375),
            ("IQ1_M", 3.625),
            ("IQ1_S", 2.75),
            ("TQ1_0", 2.3125),
            ("TQ2_0", 2.3125),
            ("MXFP4", 4.25),
            ("NVFP4", 4.5),
            ("Q1_0", 2.125),
        ],
    ),
];

#[test]
fn packed_types_keep_their_values_in_the_documented_memory() {
    for (file, columns, types) in FILES {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../plimsoll-formats/tests/fixtures").join(file);
        let checkpoint = Checkpoint::open(&path).unwrap();
        for (name, bits) in types {
            let tensor = format!("test.{name}");
            let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
            let id = declare.linear(&tensor, 3, columns).unwrap();
            let table = declare.finish();
            // A panel has room for sixteen outputs, of which three are used, and ends with a cache line.
            let panel = (16.0 * columns as f64 * bits / 8.0) as usize;
            assert_eq!(table.bytes, panel.next_multiple_of(64), "{name}");
            let mut device = device(&table, &checkpoint, &shape(None), 0, 1, Isa::detect());
            device.begin_step();
            let found = device.temp(3, columns).unwrap();
            device.embed(found, id, &[0, 1, 2], 1.0);
            let found = rows(&mut device, found);
            let mut row = RowBuf::new();
            for (index, found) in found.into_iter().enumerate() {
                checkpoint.decode_rows(&tensor, index, &mut row).unwrap();
                let mut expected = vec![0.0; columns];
                row.dequantize(&mut expected);
                let expected: Vec<u32> = expected.iter().map(|value| value.to_bits()).collect();
                assert_eq!(found, expected, "{name}, row {index}");
            }
        }
    }
}
