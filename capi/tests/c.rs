//! The interface as a C program would use it, on the CPU; and the header, read by a C compiler.

use std::ffi::{CStr, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::path::Path;
use std::process::Command;
use std::ptr;

use ferroflash_c::{
    Call, Plan, Status, Tensor, ferroflash_backward, ferroflash_error, ferroflash_forward,
    ferroflash_plan_free, ferroflash_plan_new, ferroflash_version, ferroflash_workspace,
};

const ROWS: usize = 5;
const CHANNELS: usize = 8;

fn call() -> Call {
    Call {
        size: size_of::<Call>(),
        dtype: 2,
        device: -1,
        batch: 1,
        q_heads: 1,
        kv_heads: 1,
        q_len: ROWS,
        kv_len: ROWS,
        head_dim: CHANNELS,
        value_dim: CHANNELS,
        scale: 0.0,
        softcap: 0.0,
        scaled: false,
        causal: true,
        top_left: false,
        deterministic: false,
        windowed: false,
        window: [-1, -1],
    }
}

fn tensor(data: &mut [f32]) -> Tensor {
    let row = CHANNELS as i64;
    Tensor { data: data.as_mut_ptr().cast(), strides: [row * ROWS as i64, row, row] }
}

fn message() -> String {
    // SAFETY: the message is valid until this thread's next failure.
    unsafe { CStr::from_ptr(ferroflash_error()) }.to_string_lossy().into_owned()
}

fn plan(call: &Call) -> (Status, *mut Plan) {
    // Not null, so that a failure must write null.
    let mut plan = ptr::dangling_mut();
    // SAFETY: both pointers are to live memory, and the size is true.
    let status = unsafe { ferroflash_plan_new(call, &raw mut plan) };
    (status, plan)
}

#[test]
fn a_call_both_ways() {
    let (status, plan) = plan(&call());
    assert_eq!(status, Status::Ok);
    // Keys that are all alike weigh the same, so that row i is the mean of values 0 to i.
    let size = ROWS * CHANNELS;
    let (mut q, mut k) = (vec![0.5; size], vec![0.25; size]);
    let mut v: Vec<f32> = (0..size).map(|i| (i / CHANNELS) as f32).collect();
    let (mut o, mut lse) = (vec![f32::NAN; size], vec![f32::NAN; ROWS]);
    let none: (*mut c_void, usize) = (ptr::null_mut(), 0);
    // SAFETY: every tensor has the call's dimensions and lives on.
    unsafe {
        assert_eq!(ferroflash_workspace(plan, false), 0);
        let (q, k, v) = (tensor(&mut q), tensor(&mut k), tensor(&mut v));
        let (out, rows) = (tensor(&mut o), lse.as_mut_ptr());
        let status = ferroflash_forward(plan, none.0, q, k, v, out, rows, none.0, none.1);
        assert_eq!(status, Status::Ok);
    }
    for (row, o) in o.chunks(CHANNELS).enumerate() {
        assert!(o.iter().all(|x| (x - row as f32 / 2.0).abs() < 1e-5), "row {row}: {o:?}");
    }
    // dV of a gradient of ones: key j gets 1 / (i + 1) from every row i that sees it.
    let (mut d_o, mut dv) = (vec![1.0; size], vec![f32::NAN; size]);
    let left_out = Tensor { data: ptr::null_mut(), strides: [0; 3] };
    // SAFETY: as above.
    unsafe {
        let (q, k, v) = (tensor(&mut q), tensor(&mut k), tensor(&mut v));
        let (o, d_o, dv) = (tensor(&mut o), tensor(&mut d_o), tensor(&mut dv));
        let rows = lse.as_ptr();
        let status = ferroflash_backward(
            plan,
            none.0,
            q,
            k,
            v,
            o,
            rows,
            d_o,
            ptr::null(),
            left_out,
            left_out,
            dv,
            none.0,
            none.1,
        );
        assert_eq!(status, Status::Ok);
        ferroflash_plan_free(plan);
    }
    for (key, dv) in dv.chunks(CHANNELS).enumerate() {
        let want: f32 = (key..ROWS).map(|row| 1.0 / (row + 1) as f32).sum();
        assert!(dv.iter().all(|x| (x - want).abs() < 1e-5), "key {key}: {dv:?}");
    }
}

#[test]
fn refusals_have_words() {
    let cases = [
        (Call { size: 8, ..call() }, "call.size"),
        (Call { size: size_of::<Call>() + 8, ..call() }, "call.size"),
        (Call { dtype: 9, ..call() }, "call.dtype"),
        (Call { kv_heads: 0, ..call() }, "kv_heads"),
        (Call { scale: f32::NAN, scaled: true, ..call() }, "scale"),
        (Call { softcap: f32::NAN, ..call() }, "softcap"),
        (Call { softcap: -1.0, ..call() }, "softcap"),
        (Call { device: -2, ..call() }, "call.device"),
        (Call { head_dim: 0, ..call() }, "head_dim"),
        (Call { q_heads: 3, kv_heads: 2, ..call() }, "q_heads"),
        (Call { q_len: usize::MAX, ..call() }, "q_len"),
        (Call { batch: usize::MAX, q_heads: usize::MAX, ..call() }, "batch"),
    ];
    for (call, argument) in cases {
        let (status, made) = plan(&call);
        assert_eq!((status, made), (Status::Invalid, ptr::null_mut()), "{argument}");
        assert!(message().starts_with(argument), "{}", message());
    }
    // SAFETY: nulls are refused.
    unsafe {
        assert_eq!(ferroflash_plan_new(ptr::null(), ptr::null_mut()), Status::Invalid);
        ferroflash_plan_free(ptr::null_mut());
        let (_, plan) = plan(&call());
        let mut data = vec![0.0; ROWS * CHANNELS];
        let (good, bad) = (tensor(&mut data), Tensor { data: ptr::null_mut(), strides: [0; 3] });
        let none = ptr::null_mut();
        let status =
            ferroflash_forward(plan, none, good, bad, good, good, ptr::null_mut(), none, 0);
        assert_eq!(status, Status::Invalid);
        assert!(message().starts_with("k:"), "{}", message());
        ferroflash_plan_free(plan);
        let version = CStr::from_ptr(ferroflash_version());
        assert_eq!(version.to_bytes(), env!("CARGO_PKG_VERSION").as_bytes());
    }
}

/// What a C program may hand over that no Rust one can: any byte as a flag, any address.
#[test]
fn bytes_that_are_no_call_are_refused() {
    let flags = [
        (offset_of!(Call, scaled), "call.scaled"),
        (offset_of!(Call, causal), "call.causal"),
        (offset_of!(Call, top_left), "call.top_left"),
        (offset_of!(Call, deterministic), "call.deterministic"),
        (offset_of!(Call, windowed), "call.windowed"),
    ];
    for (place, argument) in flags {
        let mut bytes = MaybeUninit::new(call());
        let mut made = ptr::dangling_mut();
        // SAFETY: the byte is one of the structure, which is only read as bytes from then on.
        let status = unsafe {
            bytes.as_mut_ptr().cast::<u8>().add(place).write(2);
            ferroflash_plan_new(bytes.as_ptr(), &raw mut made)
        };
        assert_eq!((status, made), (Status::Invalid, ptr::null_mut()), "{argument}");
        assert!(message().starts_with(argument), "{}", message());
    }
    let mut room = [MaybeUninit::new(call()), MaybeUninit::new(call())];
    let mut slots = [ptr::null_mut(); 2];
    // SAFETY: both addresses are inside live memory, though not of what they claim.
    unsafe {
        let apart = room.as_mut_ptr().cast::<u8>().add(1).cast::<Call>();
        let status = ferroflash_plan_new(apart, slots.as_mut_ptr());
        assert_eq!(status, Status::Invalid);
        assert!(message().starts_with("call: address"), "{}", message());
        let apart = slots.as_mut_ptr().cast::<u8>().add(1).cast::<*mut Plan>();
        let status = ferroflash_plan_new(&call(), apart);
        assert_eq!(status, Status::Invalid);
        assert!(message().starts_with("plan: address"), "{}", message());
    }
}

#[test]
fn bad_tensors_are_refused_by_name() {
    let (_, plan) = plan(&call());
    let mut data = vec![0.5_f32; 16 * ROWS * CHANNELS];
    let good = tensor(&mut data);
    // SAFETY: an address inside `data`, whose rest is more than a tensor.
    let apart = Tensor { data: unsafe { good.data.cast::<u8>().add(2) }.cast(), ..good };
    let null = Tensor { data: ptr::null_mut(), ..good };
    let over = Tensor { strides: [0; 3], ..good };
    let (rows, none) = (data.as_mut_ptr(), ptr::null_mut());
    // SAFETY: an address inside `data`.
    let apart_rows = unsafe { rows.cast::<u8>().add(1) }.cast::<f32>();
    // SAFETY: every tensor is refused before it is read, or has the call's dimensions; that the
    // inputs are also outputs is noticed by nothing but a run, and none gets so far.
    unsafe {
        let forward =
            |q, k, v, o, lse: *mut f32| ferroflash_forward(plan, none, q, k, v, o, lse, none, 0);
        let backward = |o, lse: *const f32, d_o, d_lse: *const f32, dv| {
            let left_out = Tensor { data: none, strides: [0; 3] };
            let (q, k, v) = (good, good, good);
            ferroflash_backward(
                plan, none, q, k, v, o, lse, d_o, d_lse, left_out, left_out, dv, none, 0,
            )
        };
        let checks: [(&str, &dyn Fn() -> Status); 10] = [
            ("q:", &|| forward(apart, good, good, good, ptr::null_mut())),
            ("o:", &|| forward(good, good, good, null, ptr::null_mut())),
            ("o:", &|| forward(good, good, good, over, ptr::null_mut())),
            ("lse:", &|| forward(good, good, good, good, apart_rows)),
            ("o:", &|| backward(null, rows, good, ptr::null(), good)),
            ("lse:", &|| backward(good, ptr::null(), good, ptr::null(), good)),
            ("lse:", &|| backward(good, apart_rows, good, ptr::null(), good)),
            ("d_o:", &|| backward(good, rows, apart, ptr::null(), good)),
            ("d_lse:", &|| backward(good, rows, good, apart_rows, good)),
            ("dv:", &|| backward(good, rows, good, ptr::null(), over)),
        ];
        for (argument, check) in checks {
            assert_eq!(check(), Status::Invalid, "{argument}");
            assert!(message().starts_with(argument), "{argument} {}", message());
        }
        ferroflash_plan_free(plan);
        assert_eq!(ferroflash_workspace(ptr::null(), true), 0);
    }
}

#[test]
fn the_header_is_c() {
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/ferroflash.h");
    let text = std::fs::read_to_string(&header).expect("the header is there");
    let source = include_str!("../src/lib.rs");
    let functions = source.lines().filter_map(|line| line.split_once("extern \"C\" fn "));
    for (_, function) in functions {
        let name = function.split('(').next().expect("a name");
        assert!(text.contains(name), "{name} is not in the header; see capi/cbindgen.toml");
    }
    let check = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c"];
    match Command::new("cc").args(check).arg(&header).status() {
        Ok(status) => assert!(status.success()),
        Err(_) => eprintln!("skipped: there is no C compiler"),
    }
}
