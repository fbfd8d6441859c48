//! Every kernel is accepted, and can be said in the languages of Metal, Direct3D and Vulkan.

use naga::back::{hlsl, msl, spv};
use naga::valid::{Capabilities, ValidationFlags, Validator};
use plimsoll_device::KvDtype;
use plimsoll_gpu::kernel::Kernel;
use plimsoll_kernels::{PackKind, PackScales, QuantPacking};

/// Every packing that a file may lead to, and some that none does.
fn packings() -> Vec<PackKind> {
    let mut all =
        vec![PackKind::F32, PackKind::F16, PackKind::Bf16, PackKind::F8 { group: 128 }, PackKind::F8 { group: 5 }];
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [16, 32, 64, 128] {
            for scales in [PackScales::F16, PackScales::F32, PackScales::Super, PackScales::SuperF32] {
                let own = matches!(scales, PackScales::F16 | PackScales::F32);
                for offset in [false, true].into_iter().filter(|_| group <= 32 || own) {
                    let zero = if offset { 0 } else { 1 << (bits - 1) };
                    all.push(PackKind::Quant(QuantPacking { bits, group, scales, zero, offset, codebook: None }));
                }
            }
        }
    }
    for scales in [PackScales::E8m0Half, PackScales::Ue4m3Half, PackScales::F16] {
        let codebook = Some(std::array::from_fn(|code| code as u8 * 3));
        all.push(PackKind::Quant(QuantPacking { bits: 4, group: 32, scales, zero: 12, offset: false, codebook }));
    }
    all
}

fn kernels() -> Vec<Kernel> {
    let mut all = Kernel::COMMON.to_vec();
    let products: [fn(PackKind) -> Kernel; 5] =
        [Kernel::Linear, Kernel::Tiles, Kernel::Embed, Kernel::Experts, Kernel::ExpertTiles];
    all.extend(packings().into_iter().flat_map(|kind| products.map(|of| of(kind))));
    all.extend(Kernel::ROUTING);
    all.extend(Kernel::ENCODER);
    all.extend([2, 3, 4].map(Kernel::Conv));
    all.extend([6, 16, 32, 64, 72, 80].map(Kernel::Within));
    all.extend([Kernel::NormHeads, Kernel::Gates, Kernel::TimeSteps]);
    all.extend([16, 100, 128, 256].into_iter().flat_map(|dim| [false, true].map(|added| Kernel::Recur(dim, added))));
    for dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Q8] {
        all.push(Kernel::Store(dtype));
        all.extend([16, 64, 80, 128, 256, 512].map(|head_dim| Kernel::Attend(dtype, head_dim)));
    }
    all
}

#[test]
fn kernels_are_accepted_and_translated() {
    for kernel in kernels() {
        let source = kernel.source();
        let module = naga::front::wgsl::parse_str(&source).unwrap_or_else(|e| panic!("{kernel:?}: {}\n{source}", e));
        let info =
            Validator::new(ValidationFlags::all(), Capabilities::IMMEDIATES | Capabilities::SHADER_FLOAT16_IN_FLOAT32)
                .validate(&module)
                .unwrap_or_else(|e| panic!("{kernel:?}: {e:?}"));
        let options = msl::Options { fake_missing_bindings: true, ..msl::Options::default() };
        let (metal, _) = msl::write_string(&module, &info, &options, &msl::PipelineOptions::default())
            .unwrap_or_else(|e| panic!("{kernel:?} for Metal: {e}"));
        assert!(metal.contains("kernel void"), "{kernel:?}");
        let mut direct3d = String::new();
        let immediates_target = Some(hlsl::BindTarget::default());
        let options = hlsl::Options { fake_missing_bindings: true, immediates_target, ..hlsl::Options::default() };
        let pipeline = hlsl::PipelineOptions::default();
        hlsl::Writer::new(&mut direct3d, &options, &pipeline)
            .write(&module, &info, None)
            .unwrap_or_else(|e| panic!("{kernel:?} for Direct3D: {e}"));
        assert!(direct3d.contains("numthreads"), "{kernel:?}");
        let words = spv::write_vec(&module, &info, &spv::Options::default(), None)
            .unwrap_or_else(|e| panic!("{kernel:?} for Vulkan: {e}"));
        assert!(words.len() > 100, "{kernel:?}");
    }
}
