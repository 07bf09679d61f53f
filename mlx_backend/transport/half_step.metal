// A half-step of Sinkhorn: the log-sum-exp of each row of scores with a potential for each column, a tile of columns at a time. Of no
// score more is kept than a tile's. A threadgroup has one head and ROWS rows, 8 to a simdgroup; of each 8 x 8 block of a matrix a lane
// has two neighbours of one row.
//
//   S = scale q k^T log2(e) + potential log2(e)         (8, KEYS), then the mask
//   top' = max(top, max_j S)                            (8,)
//   part = part 2^(top - top') + sum_j 2^(S - top')     total = total 2^(top - top') + part every 64 tiles
//   lse = (top + log2 total) ln 2                       -inf where a row sees nothing
//
// q (bq, n, D), k (bk, m, D), potential (bp, m), mask (b, n or 1, m or 1); of (4, heads): which of the b a head uses. lse (heads, n).
// sizes: n, m, mask rows, mask columns.  factors: scale log2(e).  The column step is this kernel with q and k exchanged.

constexpr int PITCH = D + 16 / int(sizeof(T));                    // rows of a tile begin in different banks
threadgroup T tile[KEYS * PITCH];

const int n = sizes[0], m = sizes[1];
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
const int head = threadgroup_position_in_grid.y, heads = threadgroups_per_grid.y;
const int row = (lane / 4 & 4) + lane / 2 % 4, col = (lane / 4 & 2) * 2 + lane % 2 * 2;
const int i = threadgroup_position_in_grid.x * ROWS + 8 * simd + row;
const auto queries = q + (size_t(of[head]) * n + min(i, n - 1)) * D;              // auto: MLX has small arrays in constant memory
const auto keys = k + size_t(of[heads + head]) * m * D;
const auto potentials = potential + size_t(of[2 * heads + head]) * m;
const auto masks = mask + (size_t(of[3 * heads + head]) * sizes[2] + (sizes[2] > 1 ? min(i, n - 1) : 0)) * sizes[3];

simdgroup_matrix<float, 8, 8> Q[D / 8], S[KEYS / 8];
for (int c = 0; c < D / 8; c++) {
  Q[c].thread_elements()[0] = float(queries[8 * c + col]);
  Q[c].thread_elements()[1] = float(queries[8 * c + col + 1]);
}
float top = -INFINITY, part = 0.0f, total = 0.0f;

for (int j0 = 0; j0 < m; j0 += KEYS) {
  for (int t = simd * 32 + lane; t < KEYS * D; t += 32 * SIMDS) {
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

  float largest = top, sum = 0.0f;
  for (int b = 0; b < KEYS / 8; b++) {
    for (int e = 0; e < 2; e++) {
      const int j = j0 + 8 * b + col + e, at = min(j, m - 1);
      const bool sees = j < m && (!MASKED || masks[sizes[3] > 1 ? at : 0]);
      const float s = sees ? S[b].thread_elements()[e] * factors[0] + potentials[at] * M_LOG2E_F : -INFINITY;
      S[b].thread_elements()[e] = s;
      largest = max(largest, s);
    }
  }
  largest = max(largest, simd_shuffle_xor(largest, 1));
  largest = max(largest, simd_shuffle_xor(largest, 8));
  const float shift = largest == -INFINITY ? 0.0f : largest, fade = exp2(top - shift);
  for (int b = 0; b < KEYS / 8; b++) {
    sum += exp2(S[b].thread_elements()[0] - shift) + exp2(S[b].thread_elements()[1] - shift);
  }
  sum += simd_shuffle_xor(sum, 1);
  sum += simd_shuffle_xor(sum, 8);

  top = largest;
  part = part * fade + sum;
  total *= fade;
  if (j0 / KEYS % 64 == 63) {                                     // no chain of more than 64 additions
    total += part;
    part = 0.0f;
  }
}

total += part;
if (i < n && col == 0) {
  lse[size_t(head) * n + i] = total == 0.0f ? -INFINITY : (top + log2(total)) * M_LN2_F;
}
