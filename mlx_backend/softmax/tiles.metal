// Softmax attention over tiles of keys, the largest logit and the sum of each row kept as it goes. A threadgroup has one head and
// ROWS queries, 8 to a simdgroup; of each 8 x 8 block of a matrix a lane has two neighbours of one row.
//
//   S = scale q k^T log2(e)          (8, KEYS)    then softcap, bias, mask
//   top' = max(top, max_j S)         (8,)
//   W = 2^(S - top')                 SIGNED: 2^(|S| - top') with the sign of S
//   total = total 2^(top - top') + sum_j |W|
//   acc = acc 2^(top - top') + W v   (8, E)       a sum of its own for each tile
//
// q (bq, n, D), k (bk, m, D), v (bv, m, E), bias and mask (b, n or 1, m or 1); of (6, heads): which of the b a head uses, and its sink.
// sizes: n, m, low, high, bias rows, bias columns, mask rows, mask columns.  factors: scale log2(e), softcap log2(e).
// auto: MLX has arrays of fewer than 8 numbers in constant memory, others in device memory.

constexpr int PITCH = (D > E ? D : E) + 16 / int(sizeof(T));      // rows of a tile begin in different banks
threadgroup T tile[KEYS * PITCH];
threadgroup bool broken[SIMDS];

const int n = sizes[0], m = sizes[1], low = sizes[2], high = sizes[3];
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
const int thread_at = simd * 32 + lane;
const int head = threadgroup_position_in_grid.y, i0 = threadgroup_position_in_grid.x * ROWS;
const int heads = threadgroups_per_grid.y;
const int row = (lane / 4 & 4) + lane / 2 % 4, col = (lane / 4 & 2) * 2 + lane % 2 * 2;
const int i = i0 + 8 * simd + row;
const auto queries = q + (size_t(of[head]) * n + min(i, n - 1)) * D;
const auto keys = k + size_t(of[heads + head]) * m * D;
const auto values = v + size_t(of[2 * heads + head]) * m * E;
const auto biases = bias + size_t(of[3 * heads + head]) * sizes[4] * sizes[5] + (sizes[4] > 1 ? size_t(min(i, n - 1)) * sizes[5] : 0);
const auto masks = mask + size_t(of[4 * heads + head]) * sizes[6] * sizes[7] + (sizes[6] > 1 ? size_t(min(i, n - 1)) * sizes[7] : 0);

simdgroup_matrix<float, 8, 8> Q[D / 8], S[KEYS / 8], acc[E / 8];
for (int c = 0; c < D / 8; c++) {
  Q[c].thread_elements()[0] = float(queries[8 * c + col]);
  Q[c].thread_elements()[1] = float(queries[8 * c + col + 1]);
}
for (int c = 0; c < E / 8; c++) {
  acc[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}
float top = SUNK ? sink[of[5 * heads + head]] * M_LOG2E_F : -INFINITY;
float total = top == -INFINITY ? 0.0f : exp2(top - top);
ushort met = 0;

const int j_end = min(m, min(i0 + ROWS, n) + high);
for (int j0 = max(0, i0 + low) / KEYS * KEYS; j0 < j_end; j0 += KEYS) {
  for (int t = thread_at; t < KEYS * D; t += 32 * SIMDS) {
    tile[t / D * PITCH + t % D] = j0 + t / D < m ? keys[size_t(j0) * D + t] : T(0);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int b = 0; b < KEYS / 8; b++) {
    S[b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int c = 0; c < D / 8; c++) {
      simdgroup_matrix<float, 8, 8> K;
      K.thread_elements()[0] = float(tile[(8 * b + col) * PITCH + 8 * c + row]);
      K.thread_elements()[1] = float(tile[(8 * b + col + 1) * PITCH + 8 * c + row]);
      simdgroup_multiply_accumulate(S[b], Q[c], K, S[b]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  bool unclean = false;
  for (int t = thread_at; t < KEYS * E; t += 32 * SIMDS) {
    const T x = j0 + t / E < m ? values[size_t(j0) * E + t] : T(0);
    unclean = unclean || !isfinite(float(x));
    tile[t / E * PITCH + t % E] = x;
  }
  unclean = simd_any(unclean);
  if (lane == 0) {
    broken[simd] = unclean;
  }

  uint seen = 0;                                     // a bit for each of the lane's logits
  float largest = top, sum = 0.0f, shares[KEYS / 8][2];
  for (int b = 0; b < KEYS / 8; b++) {
    for (int e = 0; e < 2; e++) {
      const int j = j0 + 8 * b + col + e;
      float s = S[b].thread_elements()[e] * factors[0];
      s = CAPPED ? factors[1] * tanh(s / factors[1]) : s;
      const bool sees = j < m && j >= i + low && j <= i + high && (!MASKED || masks[sizes[7] > 1 ? min(j, m - 1) : 0]);
      s = BIASED ? s + biases[sizes[5] > 1 ? min(j, m - 1) : 0] * M_LOG2E_F : s;
      seen |= uint(sees) << (2 * b + e);
      S[b].thread_elements()[e] = s;
      shares[b][e] = sees ? (SIGNED ? abs(s) : s) : -INFINITY;
      largest = max(largest, shares[b][e]);
    }
  }
  largest = max(largest, simd_shuffle_xor(largest, 1));
  largest = max(largest, simd_shuffle_xor(largest, 8));
  met |= seen != 0;
  const float shift = largest == -INFINITY ? 0.0f : largest;
  for (int b = 0; b < KEYS / 8; b++) {
    for (int e = 0; e < 2; e++) {
      const float s = S[b].thread_elements()[e], w = exp2(shares[b][e] - shift);
      sum += SIGNED == 2 && s == 0.0f ? 0.0f : w;
      const float sign = s > 0.0f ? 1.0f : s < 0.0f ? -1.0f : s;       // NaN stays NaN
      S[b].thread_elements()[e] = SIGNED && (seen >> (2 * b + e) & 1) ? w * sign : w;
    }
  }
  sum += simd_shuffle_xor(sum, 1);
  sum += simd_shuffle_xor(sum, 8);
  const float fade = exp2(top - shift);
  top = largest;
  total = total * fade + sum;

  threadgroup_barrier(mem_flags::mem_threadgroup);
  bool clean = true;
  for (int s = 0; s < SIMDS; s++) {
    clean = clean && !broken[s];
  }
  for (int c = 0; c < E / 8; c++) {
    simdgroup_matrix<float, 8, 8> R = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    if (clean) {
      for (int b = 0; b < KEYS / 8; b++) {
        simdgroup_matrix<float, 8, 8> V;
        V.thread_elements()[0] = float(tile[(8 * b + row) * PITCH + 8 * c + col]);
        V.thread_elements()[1] = float(tile[(8 * b + row) * PITCH + 8 * c + col + 1]);
        simdgroup_multiply_accumulate(R, S[b], V, R);
      }
    } else {                                         // 0 * NaN is NaN: what a query does not see is left out
      for (int b = 0; b < KEYS / 8; b++) {
        for (int key = 0; key < 8; key++) {
          const int other = (lane & ~9) | (key / 2 & 1) | (key / 4) << 3;
          const float w = simd_shuffle(S[b].thread_elements()[key % 2], other);
          const bool sees = simd_shuffle(seen, other) >> (2 * b + key % 2) & 1;
          for (int e = 0; e < 2; e++) {
            R.thread_elements()[e] += sees ? w * float(tile[(8 * b + key) * PITCH + 8 * c + col + e]) : 0.0f;
          }
        }
      }
    }
    for (int e = 0; e < 2; e++) {
      acc[c].thread_elements()[e] = acc[c].thread_elements()[e] * fade + R.thread_elements()[e];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

met |= simd_shuffle_xor(met, 1);
met |= simd_shuffle_xor(met, 8);
total += SIGNED == 2 ? 1e-6f : 0.0f;
const bool empty = total == 0.0f || (total != total && met == 0);          // a NaN of the sink alone does not count where nothing is seen
if (i < n) {
  for (int c = 0; c < E / 8; c++) {
    for (int e = 0; e < 2; e++) {
      out[(size_t(head) * n + i) * E + 8 * c + col + e] = T(empty ? 0.0f : acc[c].thread_elements()[e] / total);
    }
  }
  if (col == 0) {
    lse[size_t(head) * n + i] = total == 0.0f ? -INFINITY : (top + log2(total)) * M_LN2_F;
  }
}
