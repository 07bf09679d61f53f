// simdgroup_matrix 8x8: each of the 32 lanes holds two neighbouring elements of one row.
#pragma once
#include "simd.hpp"

namespace emu {

// lane -> (row, first column). The layout Apple's kernels rely on when they touch thread_elements().
inline int matrix_row(int lane) { return ((lane / 4) & 4) + (lane / 2) % 4; }
inline int matrix_column(int lane) { return ((lane / 4) & 2) * 2 + (lane % 2) * 2; }
inline int matrix_lane(int row, int column) { return ((row & 4) << 2) + ((column & 4) << 1) + (row & 3) * 2 + ((column & 2) >> 1); }

// Where element e of a lane lies in memory; origin.x counts columns, origin.y rows.
inline ulong matrix_offset(int lane, int e, ulong row_length, ulong2 origin, bool transpose) {
  const ulong row = matrix_row(lane), column = matrix_column(lane) + e;
  return transpose ? (origin.y + column) * row_length + origin.x + row : (origin.y + row) * row_length + origin.x + column;
}

inline int full_simdgroup(int count, const char* what) {
  if (count != kSimdWidth) emu_fail(what);
  return count;
}

}  // namespace emu

namespace metal {

template <class T, int Columns, int Rows = Columns>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "only 8 x 8 simdgroup matrices exist");
  vec<T, 2> elements;

  // Uninitialised on the GPU: poisoned here.
  simdgroup_matrix() { __builtin_memset((void*)&elements, 0xFF, sizeof elements); }
  explicit simdgroup_matrix(T diagonal) {
    const int lane = emu_lane(), row = emu::matrix_row(lane), column = emu::matrix_column(lane);
    elements = vec<T, 2>(row == column ? diagonal : T(0), row == column + 1 ? diagonal : T(0));
  }
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Columns, int Rows = Columns>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> made;
  made.elements = vec<T, 2>(value);
  return made;
}
template <class T, int Columns, int Rows = Columns>
simdgroup_matrix<T, Columns, Rows> make_diagonal_simdgroup_matrix(T value) { return simdgroup_matrix<T, Columns, Rows>(value); }

template <class T>
void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* source, ulong row_length = 8, ulong2 origin = ulong2(0), bool transpose = false,
                    int line = __builtin_LINE()) {
  emu::Lanes<char> lanes(emu::kSimd, 0, "simdgroup_load", line);
  emu::full_simdgroup(lanes.count, "simdgroup_load needs a full simdgroup of 32 threads");
  for (int e = 0; e < 2; ++e) {
    m.elements[e] = source[emu::matrix_offset(lanes.lane, e, row_length, origin, transpose)];
  }
}

template <class T>
void simdgroup_store(simdgroup_matrix<T, 8, 8> m, T* target, ulong row_length = 8, ulong2 origin = ulong2(0), bool transpose = false,
                     int line = __builtin_LINE()) {
  emu::Lanes<char> lanes(emu::kSimd, 0, "simdgroup_store", line);
  emu::full_simdgroup(lanes.count, "simdgroup_store needs a full simdgroup of 32 threads");
  for (int e = 0; e < 2; ++e) {
    target[emu::matrix_offset(lanes.lane, e, row_length, origin, transpose)] = m.elements[e];
  }
}

}  // namespace metal

namespace emu {

// Fragments travel as floats (exact for half and bfloat); the products accumulate in float and are rounded once to the result type.
struct Fragments {
  float a[2], b[2];
};

template <class D, class A, class B>
void matrix_product(D& d, const A& a, const B& b, const float start[2], const char* what, int line) {
  const Fragments mine = {{float(a.elements[0]), float(a.elements[1])}, {float(b.elements[0]), float(b.elements[1])}};
  Lanes<Fragments> lanes(kSimd, mine, what, line);
  full_simdgroup(lanes.count, "a simdgroup matrix product needs a full simdgroup of 32 threads");
  const int row = matrix_row(lanes.lane), column = matrix_column(lanes.lane);
  for (int e = 0; e < 2; ++e) {
    float sum = start[e];
    for (int k = 0; k < 8; ++k) {
      const float left = lanes.values[matrix_lane(row, k)].a[k & 1];
      const float right = lanes.values[matrix_lane(k, column + e)].b[(column + e) & 1];
      sum = __builtin_fmaf(left, right, sum);
    }
    using T = std::remove_reference_t<decltype(d.elements[0])>;
    d.elements[e] = T(sum);
  }
}

}  // namespace emu

namespace metal {

template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
                                   simdgroup_matrix<C, 8, 8> c, int line = __builtin_LINE()) {
  const float start[2] = {float(c.elements[0]), float(c.elements[1])};
  emu::matrix_product(d, a, b, start, "simdgroup_multiply_accumulate", line);
}
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
                        int line = __builtin_LINE()) {
  const float start[2] = {0.0f, 0.0f};
  emu::matrix_product(d, a, b, start, "simdgroup_multiply", line);
}

}  // namespace metal
